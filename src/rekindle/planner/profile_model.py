"""Measures a model's training step, block by block, so that it need not fit without help.

One step runs with every block recomputed, to see the order of the blocks, what they are given, and
what the rest of the step takes. Then each distinct block is run alone, forward and backward, by
every candidate that is worth having: bytes and times are those of the real thing.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rekindle.modules.blocks import unwrapped_blocks
from rekindle.modules.unwrapping import class_name
from rekindle.offload.offload_options import TierName
from rekindle.planner.candidates import with_casts
from rekindle.planner.loss import Loss
from rekindle.planner.measure.block_benchmark import BlockBenchmark
from rekindle.planner.measure.link import link_bandwidth
from rekindle.planner.measure.memory_meter import metered_as_a_whole
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.measure.static_memory import static_bytes
from rekindle.planner.measure.timing import Clock, DeviceClock
from rekindle.planner.measure.whole_step_calibration import told_together
from rekindle.planner.progress import count_progress, report_progress
from rekindle.planner.ranks.joint_candidates import joint_menu
from rekindle.planner.ranks.rank_sync import all_gather, raised_on_all_ranks
from rekindle.planner.ranks.worst_case import MergedTrace, merge_traces, worst_case
from rekindle.planner.timeline import cached_after_blocks, simulate
from rekindle.planner.trace.block_calls import Arguments, BlockCall
from rekindle.planner.trace.block_signature import BlockKey, block_key, settings_of
from rekindle.planner.trace.step_trace import StepTrace, trace_step
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import BlockProfile, Candidate, Profile
from rekindle.regions.recompute import ambient
from rekindle.strategy import Recompute
from rekindle.torch_private.data_parallel import gathered_around


@dataclass(frozen=True)
class Bench:
    """What a step is run on, and what is known of it."""

    device: torch.device
    name: str
    clock: Clock
    bytes_per_second: float
    """To the tier and back; 0 if there is no way."""
    tier: TierName = "host"
    known: Profile | None = None
    """If its blocks were measured before: that profile."""
    shows_more_together: bool = False
    """Whether host and device work at once, so that blocks alone do not tell all."""


def bench_of(device: torch.device, spill: bool = False) -> Bench:
    """A device that is there, to be measured; with a link to disk, or else to host memory."""
    tier: TierName = "disk" if spill else "host"
    return Bench(
        device,
        _name(device),
        DeviceClock(device),
        link_bandwidth(device, tier),
        tier,
        shows_more_together=device.type == "cuda",
    )


def measure(
    model: nn.Module, batch: Any, optimizer: Any, bench: Bench, loss: Loss | None = None
) -> Profile:
    """The profile of a model's training step; the model ends as it was."""
    device = bench.device
    step = TrainingStep(model, batch, loss)
    blocks = unwrapped_blocks(model)
    _refuse_scripts(blocks)
    _refuse_other_models(model, blocks)
    static = max(all_gather(static_bytes(model, optimizer, device, step.batch_tensors())))
    with repeatable(step), metered_as_a_whole(device, step.existing_tensors()) as whole:
        report_progress("trace")
        settings = settings_of(blocks)

        def key_of(path: str, arguments: Arguments, around: ambient.Ambient) -> BlockKey:
            return block_key(blocks[path], settings[path], arguments, around)

        trace, calls = trace_step(step, blocks, device, bench.clock, key_of)
        if not trace.order:
            raise ValueError("The step ran none of the model's blocks: does it call the model?")
        joint = merge_traces(all_gather(trace), blocks)
        with gathered_around(model, blocks.values()):
            profiles = _profiles(blocks, trace, calls, joint, bench)
        order = [(path, joint.indices[path]) for path in joint.order]
        found = Profile(
            model=class_name(model),
            device=bench.name,
            batch=step.describe_batch(),
            static_bytes=static,
            before_bytes=trace.before_bytes,
            rest_peak=trace.rest_peak,
            rest_seconds=0.0,
            bytes_per_second=bench.bytes_per_second,
            blocks=tuple(profiles),
            order=tuple(order),
            first_peak=trace.first_peak,
            last_peak=trace.last_peak,
            between=joint.between,
            passed=_passed(joint.passed, [profiles[index] for _, index in order]),
            inputs=trace.inputs,
            unused=tuple(path for path in blocks if path not in joint.order),
            cast_epochs=joint.cast_epochs if _has_casts(profiles) else (),
            cached_rest_peak=max(trace.cached_rest_peak, 0),
            casts_in_backward=trace.casts_in_backward,
            recompute_peak=static + trace.peak,
            output_held=step.output_held,
            loss=step.loss_source,
        )
        if (
            trace.casts_freed_before_backward
        ):  # what was freed with the cache had been counted as there
            casts = cached_after_blocks(found, _recomputed(found))
            found = replace(found, rest_peak=found.rest_peak + casts)
        found = worst_case(all_gather(found), found)
        found = replace(found, rest_seconds=max(joint.seconds - _recomputed_seconds(found), 0.0))
        if bench.shows_more_together:
            report_progress("whole step")
            found = told_together(model, found, partial(bench.clock.timed, step))
        if not bench.clock.is_exact:  # else nothing was allocated
            found = replace(found, planning_peak=static + max(all_gather(whole.peak())))
    return found


def _refuse_other_models(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Ranks that plan together have the same model; they need not run the same blocks of it."""
    kinds = {path: class_name(block) for path, block in blocks.items()}
    models = all_gather((class_name(model), kinds))
    if any(other != models[0] for other in models):
        told = " and ".join(dict.fromkeys(f"{name} with {len(own)} blocks" for name, own in models))
        raise raised_on_all_ranks(
            ValueError(
                f"Ranks that plan together have to have the same model, but have {told}. Stages of "
                "a pipeline are planned apart: give group= the process group of one stage's ranks."
            )
        )


def _refuse_scripts(blocks: dict[str, nn.Module]) -> None:
    """TorchScript runs a module differently from call to call, and takes no hooks."""
    for path, block in blocks.items():
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or type(block).__name__} is scripted: TorchScript changes what a module "
                "saves from one call to the next, so there is no plan for it. Plan and train the "
                "model as it is before it is scripted."
            )


def _passed(seen: tuple[int, ...], blocks: list[BlockProfile]) -> tuple[int, ...]:
    """What each block is handed that nobody holds, not even the block that made it."""
    let_go = [0, *(block.output_freed for block in blocks)]
    return tuple(min(pair) for pair in zip(seen, let_go, strict=False))


def _has_casts(blocks: list[BlockProfile]) -> bool:
    """Whether autocast caches casts of any block's weights."""
    return any(each.casts_cached for block in blocks for each in block.candidates)


def _recomputed_seconds(profile: Profile) -> float:
    """What all blocks take together if all of them are recomputed."""
    return simulate(profile, _recomputed(profile)).seconds


def _recomputed(profile: Profile) -> list[Candidate]:
    """For each block, the candidate that recomputes all of it."""
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    return [next(each for each in menu if each.strategy == Recompute()) for menu in menus]


def _profiles(
    blocks: dict[str, nn.Module],
    trace: StepTrace,
    calls: dict[BlockKey, BlockCall],
    joint: MergedTrace,
    bench: Bench,
) -> list[BlockProfile]:
    """The blocks of each kind, run alone on all ranks that ran one of them in the step."""
    first: dict[int, str] = {}
    for path in trace.order:
        first.setdefault(joint.indices[path], path)
    last_use = {trace.keys[path]: number for number, path in sorted(first.items())}
    called = {key: path for path, key in reversed(trace.keys.items())}
    """By key: the block whose call was gathered."""
    profiles = []
    for number, joint_key in enumerate(count_progress(joint.keys, "block")):
        own = first.get(number)
        if own is None:
            path = next(path for path, other in joint.indices.items() if other == number)
            candidates = with_casts(joint_menu(None, bench.bytes_per_second, bench.tier))
            kind = class_name(blocks[path])
            found = BlockProfile(kind, joint_key[0], candidates, joint_key[1], _NOT_RUN)
        else:
            key = trace.keys[own]
            call = calls.pop(key) if last_use[key] == number else calls[key]
            found = _block_profile(called[key], key, call, bench)
            del call
        profiles.append(found)
    return profiles


def _block_profile(path: str, key: BlockKey, call: BlockCall, bench: Bench) -> BlockProfile:
    """A block, run alone with the arguments of one of its calls."""
    signature, around = key
    if bench.known is not None:
        return _known_block(bench.known, path, signature, around)
    run = BlockBenchmark(call, bench.device, bench.clock)
    candidates = with_casts(joint_menu(run, bench.bytes_per_second, bench.tier))
    return BlockProfile(class_name(call.block), signature, candidates, around, run.output_freed)


_NOT_RUN = 2**62
"""Bytes that a block lets go of which this rank has not run: another one has, and the least of all
counts."""


def _known_block(known: Profile, path: str, signature: str, around: str) -> BlockProfile:
    """A block that was measured before."""
    found = [block for block in known.blocks if block.signature == signature]
    if len(found) > 1:  # what is around a block says, too, which devices there are
        found = [block for block in found if block.around == around]
    if not found:
        measured = "".join(f"\n  {block.signature}" for block in known.blocks)
        raise ValueError(
            f"The block {path!r} is not among those that were measured on {known.device}:\n"
            f"  {signature}\nThose are:{measured}"
        )
    return replace(found[0], around=around)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
