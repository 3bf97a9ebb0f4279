"""Profiles a model's training step, block by block, so that the plain step need not fit.

```
model + batch ─trace_steps─▶ calls of distinct blocks ─trace_block─▶ BlockTraces
    ─candidates─▶ Candidates ─measure_candidates─▶ BlockProfiles ─▶ Profile
```

One step runs with every block recomputed, to see the order of the blocks, their arguments, and the
memory and time of the rest of the step. Then each distinct block is traced, and run alone by every
candidate that moves nothing; the costs of those that move results follow from these.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rekindle.modules.apply_strategies import compile_blocks_alone
from rekindle.modules.blocks import Named, named_blocks, unwrapped_blocks
from rekindle.modules.compiled_blocks import compiled_paths, open_blocks, set_aside_around
from rekindle.modules.patterns import generalized, is_inside
from rekindle.modules.unwrapping import class_name, places, unwrapped
from rekindle.offload.owners import OffloaderSet
from rekindle.planner.candidates import (
    SMALL,
    candidates,
    in_tiles,
    recomputing_all,
    undominated,
    with_casts,
    with_names,
    with_useful_tiles,
)
from rekindle.planner.compiled_modules import warn_of_uncounted_memory
from rekindle.planner.instruments.memory_meter import metered_as_a_whole, unmetered
from rekindle.planner.instruments.timing import Clock, DeviceClock
from rekindle.planner.loss import Loss
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.measure.link import link_bandwidth, tier_share
from rekindle.planner.measure.measure_candidates import measure_candidates, offload_candidates
from rekindle.planner.measure.measure_compiled import measure_compiled
from rekindle.planner.measure.measure_rests import with_rests, with_times_of_rests
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.measure.static_memory import static_bytes
from rekindle.planner.measure.step_calibration import calibrate_to_recomputing
from rekindle.planner.measure.whole_step_calibration import calibrate_to_whole_step
from rekindle.planner.progress import count_progress, report_progress
from rekindle.planner.ranks.joint_candidates import agree_on_candidates, worst_of_ranks
from rekindle.planner.ranks.rank_sync import all_gather, raised_on_all_ranks
from rekindle.planner.ranks.worst_case import MergedTrace, merge_traces, places_in, worst_case
from rekindle.planner.step_log import StepLog
from rekindle.planner.timeline import Timeline
from rekindle.planner.trace.block_calls import BlockCall
from rekindle.planner.trace.block_signature import has_signature
from rekindle.planner.trace.block_spans import time_with_spans
from rekindle.planner.trace.block_trace import trace_block
from rekindle.planner.trace.find_blocks import find_blocks
from rekindle.planner.trace.head_ways import trace_steps
from rekindle.planner.trace.own_checkpoints import own_checkpoints_said
from rekindle.planner.trace.token_wise import token_wise_modules
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import (
    BlockKey,
    BlockProfile,
    BlockTrace,
    Candidate,
    Profile,
    StepTrace,
)
from rekindle.strategy import TierName
from rekindle.torch_private.fsdp import gathered_around, sharded_parameters

_log = logging.getLogger("rekindle")


@dataclass(frozen=True)
class MeasuringDevice:
    """The device that a step is measured on, or that fake tensors stand for."""

    device: torch.device
    name: str
    clock: Clock
    bytes_per_second: float
    """Bandwidth of the link to the tier and back; 0 if there is none."""
    tier: TierName = "host"
    tier_bytes: int | None = None
    """Bytes that this rank has room for in the tier; None if that is not known."""
    known: Profile | None = None
    """A profile from which blocks are taken, rather than measured."""
    host_runs_ahead: bool = False
    """True if host and device work at once: then a whole step shows more than blocks alone."""
    offloaders: OffloaderSet = field(default_factory=OffloaderSet, compare=False)
    """Offloaders of the blocks that are measured alone; freed with this object."""


def measuring_device(device: torch.device, spill: bool = False) -> MeasuringDevice:
    """Return a real device to measure on, with a link to disk, or else to host memory."""
    tier: TierName = "disk" if spill else "host"
    is_cuda = device.type == "cuda"
    bandwidth, room = link_bandwidth(device, tier), tier_share(tier)
    return MeasuringDevice(
        device,
        torch.cuda.get_device_name(device) if is_cuda else device.type,
        DeviceClock(device),
        bandwidth,
        tier,
        room if bandwidth else None,
        host_runs_ahead=is_cuda,
    )


def profile_model(
    model: nn.Module,
    batch: Any,
    optimizer: Any,
    measured_on: MeasuringDevice,
    loss: Loss | None = None,
    blocks: Named | None = None,
    *,
    exact: bool = True,
) -> Profile:
    """Return the profile of a model's training step; the model ends as it was.

    `blocks` names its blocks; without it, they are found. If not `exact`, strategies that change
    the last bits of gradients are candidates, too.
    """
    step = TrainingStep(model, batch, loss)
    repeated = unwrapped_blocks(model) if blocks is None else named_blocks(model, blocks)
    _refuse_scripts(repeated)
    _refuse_other_models(model, repeated)
    static = max(
        all_gather(static_bytes(model, optimizer, measured_on.device, step.batch_tensors()))
    )
    with (
        repeatable(step),
        metered_as_a_whole(measured_on.device, step.existing_tensors()) as meter,
    ):
        report_progress("trace")
        compile_blocks_alone(model, ())
        set_aside_around(model, repeated)
        found = repeated if blocks is not None else _blocks(step, measured_on.known)
        open_blocks(model, found)
        compiled = frozenset(compiled_paths(model, found))
        if measured_on.device.type == "cpu":
            warn_of_uncounted_memory(model, found)
        with own_checkpoints_said(model):
            traced = trace_steps(
                *(step, found, measured_on.device, measured_on.clock, exact),
                compiles=bool(compiled),
            )
        is_run = any(all_gather(bool(traced.first.order)))
        if not is_run and blocks is None and "" not in found:
            _log.info("%s calls none of its layers itself: it is one block", class_name(model))
            found = {"": unwrapped(model)}
            open_blocks(model, found)
            compiled = frozenset(compiled_paths(model, found))
            traced = trace_steps(
                *(step, found, measured_on.device, measured_on.clock, exact),
                compiles=bool(compiled),
            )
        trace = traced.first
        if not trace.order:
            raise ValueError("The step ran none of the model's blocks: does it call the model?")
        merged = merge_traces(all_gather(trace), found)
        with gathered_around(model, found.values()):
            profiles = _profile_blocks(
                found, compiled, trace, traced.calls, merged, measured_on, exact
            )
        profile = _assemble(step, static, trace, merged, profiles, measured_on)
        if trace.spans is not None:
            profile = calibrate_to_recomputing(profile, trace.order, trace.spans)
        profile = replace(
            profile,
            unused=tuple(p for p in found if p not in merged.order),
            left_out=_left_out(model, found),
        )
        profile = with_rests(profile, trace, traced.others)
        profile = worst_case(all_gather(profile), profile)
        profile = with_times_of_rests(profile)
        if measured_on.host_runs_ahead:
            report_progress("whole step")
            profile = calibrate_to_whole_step(
                model,
                profile,
                trace.order,
                lambda: time_with_spans(step, found, measured_on.clock)[1],
            )
        if not measured_on.clock.is_exact:  # else nothing was allocated
            profile = replace(profile, planning_peak=static + max(all_gather(meter.peak())))
    return profile


def _blocks(step: TrainingStep, known: Profile | None) -> dict[str, nn.Module]:
    """The blocks of a step's model; those of a known profile of it, if there is one."""
    if known is None:
        # A meter would take tensors that this forward reads, such as a batch that a function has in
        # its closure, for ones that existed before the steps that are measured next.
        with unmetered():
            return find_blocks(step)
    wanted = {generalized(p) for p in (*(path for path, _ in known.order), *known.unused)}
    modules = places(step.model)  # of which there may be more than in the known profile
    return {
        path: step.model.get_submodule(place)
        for path, place in modules.items()
        if generalized(path) in wanted
    }


def _left_out(model: nn.Module, blocks: Iterable[str]) -> tuple[str, ...]:
    """Modules that repeat, but neither are blocks nor in blocks nor around any."""
    return tuple(
        path
        for path in unwrapped_blocks(model)
        if not any(b == path or is_inside(b, path) or is_inside(path, b) for b in blocks)
    )


def _profile_blocks(
    blocks: dict[str, nn.Module],
    compiled: frozenset[str],
    trace: StepTrace,
    calls: dict[BlockKey, BlockCall],
    merged: MergedTrace,
    measured_on: MeasuringDevice,
    exact: bool,
) -> list[BlockProfile]:
    """Profile each distinct block, on all ranks that ran it in the step.

    A call is dropped from `calls` after its last use: its arguments are memory.
    """
    own_paths: dict[int, str] = {}
    for path in trace.order:
        own_paths.setdefault(merged.indices[path], path)
    last_use = {trace.keys[path]: index for index, path in sorted(own_paths.items())}
    traces: dict[int, BlockTrace] = {}
    if measured_on.known is None:
        for index, path in own_paths.items():
            if path not in compiled:
                call = calls[trace.keys[path]]
                traces[index] = trace_block(call, measured_on.clock.estimates)
                del call
    small = _small_blocks(traces, [merged.indices[path] for path in trace.order])
    profiles = []
    for index, merged_key in enumerate(count_progress(merged.keys, "block")):
        if index not in own_paths:
            path = next(path for path, other in merged.indices.items() if other == index)
            kind, is_compiled = class_name(blocks[path]), path in compiled
            found = _profile_block(kind, merged_key, None, is_compiled, measured_on)
        else:
            is_compiled = own_paths[index] in compiled
            key = trace.keys[own_paths[index]]
            call = calls.pop(key) if last_use[key] == index else calls[key]
            kind = class_name(call.block)
            if measured_on.known is None:
                own_trace = traces.pop(index, None)
                own = () if own_trace is None else candidates(own_trace, is_small=index in small)
                if own_trace is not None and not exact:
                    own = (*own, *in_tiles(token_wise_modules(call, own_trace)))
                found = _profile_block(kind, key, call, is_compiled, measured_on, own_trace, own)
            else:
                path = next(path for path, other in trace.keys.items() if other == key)
                found = _known_block(measured_on.known, path, key)
            del call
        profiles.append(found)
    return profiles


def _small_blocks(traces: Mapping[int, BlockTrace], order: Sequence[int]) -> frozenset[int]:
    """The smallest distinct blocks, which on every rank save little of what all blocks save."""
    saved = {index: order.count(index) * trace.saved_bytes for index, trace in traces.items()}
    left = SMALL * sum(saved.values())
    flags: dict[int, bool] = {}
    for index in sorted(saved, key=lambda index: (saved[index], index)):
        left -= saved[index]
        flags[index] = left >= 0
    of_ranks = all_gather(flags)
    indices = {index for flags in of_ranks for index in flags}
    return frozenset(i for i in indices if all(flags.get(i, True) for flags in of_ranks))


def _benchmark(call: BlockCall, measured_on: MeasuringDevice) -> BlockBenchmark:
    return BlockBenchmark(call, measured_on.device, measured_on.clock, measured_on.offloaders)


def _profile_block(
    kind: str,
    key: BlockKey,
    call: BlockCall | None,
    is_compiled: bool,
    measured_on: MeasuringDevice,
    trace: BlockTrace | None = None,
    own: Sequence[Candidate] = (),
) -> BlockProfile:
    """Measure the candidates of a block, by its trace; without a call, other ranks do."""
    benchmark = None if call is None else _benchmark(call, measured_on)
    if is_compiled:
        tier = measured_on.tier if measured_on.bytes_per_second else None
        measured = measure_compiled(benchmark, tier)
    else:
        measured = measure_candidates(benchmark, agree_on_candidates(trace, own))
        if benchmark is not None and trace is not None:
            if measured_on.bytes_per_second:
                measured |= offload_candidates(benchmark, trace, measured, measured_on.tier)
            measured = {name: with_names(each, trace) for name, each in measured.items()}
    kept = with_casts(tuple(undominated(with_useful_tiles(worst_of_ranks(measured)))))
    output_freed = _NOT_RUN if benchmark is None else benchmark.output_freed
    return BlockProfile(kind, key.signature, kept, key.ambient, output_freed, key.ops, is_compiled)


_NOT_RUN = 2**62
"""In place of the bytes of its output that a block frees, on a rank that has not run it. Ranks
agree on the least count, so this one never decides."""


def _known_block(known: Profile, path: str, key: BlockKey) -> BlockProfile:
    """Return a block of another profile that has the same signature.

    Of several, it is the one that has the path there. Ambient states and ops tell little: they name
    devices, and kernels of devices, which need not be the same.
    """
    found = [block for block in known.blocks if has_signature(block.signature, key.signature)]
    if len(found) > 1:
        there = [known.blocks[index] for other, index in known.order if other == path]
        found = [block for block in there if block in found] or [
            block for block in found if block.around == key.ambient
        ]
    if not found:
        measured = "".join(f"\n  {block.signature}" for block in known.blocks)
        raise ValueError(
            f"The block {path!r} is not among those that were measured on {known.device}:\n"
            f"  {key.signature}\nThose are:{measured}"
        )
    return replace(found[0], signature=key.signature, around=key.ambient, ops=key.ops)


def _assemble(
    step: TrainingStep,
    static: int,
    trace: StepTrace,
    merged: MergedTrace,
    blocks: list[BlockProfile],
    measured_on: MeasuringDevice,
) -> Profile:
    """Return this rank's profile, from the traces and the profiles of distinct blocks."""
    order = tuple((path, merged.indices[path]) for path in merged.order)
    has_casts = any(each.casts_cached for block in blocks for each in block.candidates)
    profile = Profile(
        model=class_name(step.model),
        device=measured_on.name,
        batch=step.describe_batch(),
        static_bytes=static,
        before_bytes=trace.before_bytes,
        rest_peak=0,
        rest_seconds=0.0,
        bytes_per_second=measured_on.bytes_per_second,
        blocks=tuple(blocks),
        order=order,
        first_peak=trace.first_peak,
        last_peak=trace.last_peak,
        between=merged.between,
        passed=_passed(merged.passed, [blocks[index] for _, index in order]),
        inputs=trace.inputs,
        cast_epochs=merged.cast_epochs if has_casts else (),
        casts_in_backward=trace.casts_in_backward,
        output_held=trace.output_held,
        loss=step.loss_source,
        tier_bytes=measured_on.tier_bytes,
    )
    return replace(profile, waiting=_waiting(step, trace, profile))


def _waiting(step: TrainingStep, trace: StepTrace, profile: Profile) -> tuple[int, ...]:
    """Bytes in each block's backward that no block holds: measured, where more than predicted.

    Where parameters are sharded, those of the next block are gathered ahead: that is in its peak.
    """
    if sharded_parameters(step.model):
        return ()
    timeline, log = Timeline(profile), StepLog()
    timeline.evaluate(timeline.terms_of(recomputing_all(profile)), log)
    found = []
    for i, place in enumerate(places_in(trace.order, [path for path, _ in profile.order])):
        begins = None if place is None else trace.backward_begins[place]
        there = log.backward[i]
        known = profile.before_bytes + there.outside + there.held + there.cached
        found.append(0 if begins is None else max(begins - known, 0))
    return tuple(found) if any(found) else ()


def _passed(passed: tuple[int, ...], blocks: list[BlockProfile]) -> tuple[int, ...]:
    """Bytes of each block's input that neither the step nor the block that made it holds."""
    freed_by_makers = [0, *(block.output_freed for block in blocks)]
    return tuple(min(pair) for pair in zip(passed, freed_by_makers, strict=False))


def _refuse_other_models(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Raise a `ValueError` if ranks have different models; they need not run the same blocks."""
    kinds = {path: class_name(block) for path, block in blocks.items()}
    models = all_gather((class_name(model), kinds))
    if any(other != models[0] for other in models):
        names = dict.fromkeys(f"{name} with {len(own)} blocks" for name, own in models)
        raise raised_on_all_ranks(
            ValueError(
                "Ranks that plan together have to have the same model, but have "
                f"{' and '.join(names)}. Stages of a pipeline are planned apart: give group= the "
                "process group of one stage's ranks."
            )
        )


def _refuse_scripts(blocks: dict[str, nn.Module]) -> None:
    """Raise a `ValueError` for a scripted block: it changes from call to call, without hooks."""
    for path, block in blocks.items():
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or type(block).__name__} is scripted: TorchScript changes what a module "
                "saves from one call to the next, so there is no plan for it. Plan and train the "
                "model as it is before it is scripted."
            )
