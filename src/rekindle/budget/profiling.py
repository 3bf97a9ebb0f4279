"""Measures a model's training step, block by block, so that it need not fit without help.

One step runs with every block recomputed, to see the order of the blocks, what they are given, and
what the rest of the step takes. Then each distinct block is run alone, forward and backward, by
every option that is worth having: bytes and times are those of the real thing.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from rekindle.budget.agreement import agreed
from rekindle.budget.alone import Lone
from rekindle.budget.graph import Graph
from rekindle.budget.link import bytes_per_second
from rekindle.budget.loss import Loss
from rekindle.budget.memory import metered_as_a_whole
from rekindle.budget.names import named
from rekindle.budget.options import (
    deriving,
    keeping_saves,
    offloading,
    selecting,
    undominated,
    with_casts,
)
from rekindle.budget.outline import Seen, outline
from rekindle.budget.plausible import at_least, plausible
from rekindle.budget.progress import each, tell
from rekindle.budget.simulate import cached_after_blocks, simulate
from rekindle.budget.static import static_bytes
from rekindle.budget.step import Step, shape_of, shapes_of
from rekindle.budget.timing import Clock, DeviceClock
from rekindle.budget.together import told_together
from rekindle.budget.traits import Traits, traits_of
from rekindle.budget.untouched import repeatable
from rekindle.budget.values import BlockProfile, Option, Profile
from rekindle.modules.blocks import blocks_of
from rekindle.offload.options import TierName
from rekindle.parallel import gathered_around
from rekindle.replay import ambient


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
        bytes_per_second(device, tier),
        tier,
        shows_more_together=device.type == "cuda",
    )


def measure(
    model: nn.Module, batch: Any, optimizer: Any, bench: Bench, loss: Loss | None = None
) -> Profile:
    """The profile of a model's training step; the model ends as it was."""
    device = bench.device
    step = Step(model, batch, loss)
    blocks = blocks_of(model)
    _refuse_scripts(blocks)
    static = static_bytes(model, optimizer, device, step.tensors())
    with repeatable(step), metered_as_a_whole(device, step.there_before()) as whole:
        tell("outline")
        seen = outline(step, blocks, device, bench.clock, partial(_key, blocks, traits_of(blocks)))
        if not seen.order:
            raise ValueError("The step ran none of the model's blocks: does it call the model?")
        with gathered_around(model, blocks.values()):
            profiles, order = _profiles(blocks, seen, bench)
        found = Profile(
            model=type(model).__name__,
            device=bench.name,
            batch=step.shapes(),
            static_bytes=static,
            before_bytes=seen.before,
            rest_peak=seen.rest_peak,
            rest_seconds=0.0,
            bytes_per_second=bench.bytes_per_second,
            blocks=tuple(profiles),
            order=tuple(order),
            first_peak=seen.first_peak,
            last_peak=seen.last_peak,
            between=tuple(seen.between),
            passed=_passed(seen.passed, [profiles[index] for _, index in order]),
            inputs=seen.inputs,
            unused=tuple(path for path in blocks if path not in seen.order),
            cast_epochs=tuple(seen.cast_epochs) if _has_casts(profiles) else (),
            cached_rest_peak=max(seen.cached_rest_peak, 0),
            casts_in_backward=seen.casts_in_backward,
            recompute_peak=static + seen.peak,
            output_held=step.output_held,
            loss=step.loss_source,
        )
        if seen.casts_gone:  # what was freed with the cache had been counted as there
            casts = cached_after_blocks(found, _recomputed(found))
            found = replace(found, rest_peak=found.rest_peak + casts)
        found = replace(found, rest_seconds=max(seen.seconds - _recomputed_seconds(found), 0.0))
        if bench.shows_more_together:
            tell("all blocks together")
            found = told_together(model, found, partial(bench.clock.timed, step))
        if not bench.clock.is_exact:  # else nothing was allocated
            found = replace(found, planning_peak=static + whole.peak())
    return found


def _refuse_scripts(blocks: dict[str, nn.Module]) -> None:
    """TorchScript runs a module differently from call to call, and takes no hooks."""
    for path, block in blocks.items():
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(
                f"{path or type(block).__name__} is scripted: TorchScript changes what a module "
                "saves from one call to the next, so there is no plan for it. Plan and train the "
                "model as it is before it is scripted."
            )


def _passed(seen: list[int], blocks: list[BlockProfile]) -> tuple[int, ...]:
    """What each block is handed that nobody holds, not even the block that made it."""
    let_go = [0, *(block.output_let_go for block in blocks)]
    return tuple(min(pair) for pair in zip(seen, let_go, strict=False))


def _has_casts(blocks: list[BlockProfile]) -> bool:
    """Whether autocast caches casts of any block's weights."""
    return any(option.casts_cached for block in blocks for option in block.options)


def _recomputed_seconds(profile: Profile) -> float:
    """What all blocks take together if all of them are recomputed."""
    return simulate(profile, _recomputed(profile)).seconds


def _recomputed(profile: Profile) -> list[Option]:
    """For each block, the option that recomputes all of it."""
    menus = (profile.options(i) for i in range(len(profile.order)))
    return [next(option for option in menu if option.fate == "recompute") for menu in menus]


def _profiles(
    blocks: dict[str, nn.Module], seen: Seen, bench: Bench
) -> tuple[list[BlockProfile], list[tuple[str, int]]]:
    first = {key: path for path, key in reversed(seen.keys.items())}
    profiles = []
    for key in each(list(seen.calls), "block"):
        path, (signature, around) = first[key], cast("tuple[str, str]", key)
        block = blocks[path]
        call = seen.calls.pop(key)
        if bench.known is not None:
            profiles.append(_known_block(bench.known, path, signature, around))
        else:
            run = Lone(block, call, bench.device, bench.clock, seen.around[key])
            options = with_casts(_menu(run, bench))
            kind, let_go = type(block).__name__, run.output_let_go
            profiles.append(BlockProfile(kind, signature, options, around, let_go))
    index = {key: i for i, key in enumerate(seen.around)}
    return profiles, [(path, index[seen.keys[path]]) for path in seen.order]


def _key(
    blocks: dict[str, nn.Module],
    traits: dict[str, Traits],
    path: str,
    call: tuple[Any, Any],
    around: ambient.Ambient,
) -> tuple[str, str]:
    """A block's signature and its ambient state: blocks with equal keys are one to the planner."""
    return _signature(blocks[path], call, traits[path]), str(around)


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


def _signature(block: nn.Module, call: tuple[Any, Any], traits: Traits) -> str:
    shapes = [f"{name} {shape_of(p)}" for name, p in block.named_parameters()]
    settings = [f"{path}.{name}={value!r}".lstrip(".") for (path, name), value in traits.items()]
    return f"{type(block).__name__}({', '.join([*shapes, *settings])}) of {shapes_of(call)}"


def _menu(run: Lone, bench: Bench) -> tuple[Option, ...]:
    """The options of a block, each measured, without those that another is better than."""
    from rekindle.budget.menu import keep_sets  # needs scipy  # noqa: PLC0415

    graph = run.graph()
    candidates = [Option("keep"), Option("recompute")]
    candidates += deriving(run.derivable(graph), graph)
    candidates += [selecting(kept, graph) for kept in keep_sets(graph)]
    candidates = agreed(candidates)  # a block that is sharded is gathered by all ranks at a time
    options = [run.measured(option) for option in each(candidates, "option")]
    options = plausible(options, run.timed_again)
    if bench.bytes_per_second:
        whole = at_least(run.measured(keeping_saves(graph)), options[0])
        host = _host_of_a_move(run, whole, graph, bench.tier)
        several = [whole, *(o for o in options if o.fate in ("derive", "select"))]
        options += [
            less for option in several for less in offloading(option, graph, host, bench.tier)
        ]
    return tuple(named(option, graph) for option in undominated(options))


def _host_of_a_move(run: Lone, whole: Option, graph: Graph, tier: TierName) -> tuple[float, float]:
    """Seconds that it takes the host to send a result away, and to bring it back."""
    moving = offloading(whole, graph, tier=tier)[:-1]  # the n-th moves n results, the last any
    if not whole.forward_host or not moving:
        return 0.0, 0.0
    moved = run.measured(moving[-1])
    count = max(len(moving) - _STAYING, 1)
    return (
        max(moved.forward_host - whole.forward_host, 0.0) / count,
        max(moved.backward_host - whole.backward_host, 0.0) / count,
    )


_STAYING = 2
"""Results that stay after all, because the backward wants them first."""


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
