"""The fates that send what is kept elsewhere, by the engine of `rekindle.offload`."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial

from torch import Tensor

from rekindle.offload.activation import Kept, Saved, unpack
from rekindle.offload.context import Engine, engine_of
from rekindle.offload.offload_options import Options, TierName, options_of
from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.held_tensor import Hooks
from rekindle.torch_private.version_counters import with_versions


@cache
def _options(fate: Decision) -> Options:
    if fate is Decision.OFFLOAD_FREELY:
        return options_of("host", "auto", "1MiB", None, None, "keep", derive=False)
    tier: TierName = "disk" if fate in (Decision.SPILL, Decision.SPILL_AS_PLANNED) else "host"
    options = options_of(tier, 1.0, 1, None, None, "keep", derive=False)
    return replace(options, hurries=fate not in AS_PLANNED.values())


_held: dict[Decision, Engine] = {}
"""The engines of fates that were in use: held here, since a policy is a value and no owner."""


def _engine(fate: Decision) -> Engine:
    engine = _held[fate] = engine_of(_options(fate))
    return engine


def _planned() -> list[Engine]:
    """The engines that plans have used in this process, or in the one it was forked from."""
    return [engine for engine in map(_held.get, AS_PLANNED.values()) if engine is not None]


def hooks_of(fate: Decision) -> Hooks:
    """What takes a tensor with this fate, and what gives it back."""
    return _engine(fate).pack, unpack


def take(fate: Decision, x: Tensor) -> Saved | Kept:
    """Take a tensor that nobody but the caller holds."""
    saved: Saved | Kept = with_versions(partial(_engine(fate).pack, is_ours=True), x)
    return saved


def trim_fates() -> None:
    """Give back what policies and plans have set aside and nothing uses."""
    for engine in list(_held.values()):
        engine.trim()


def begin_backward() -> None:
    """The backward of a model that runs by a plan begins: what is leaving is seen out first."""
    for engine in _planned():
        engine.begin_backward()


def pause(fates: Iterable[Decision], failed: bool) -> None:
    """A region that used these fates ends."""
    for fate in fates:
        _engine(fate).pause(failed)
