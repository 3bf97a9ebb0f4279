"""Decisions of policies that copy results elsewhere, carried out by offloaders.

The owner of the offloaders is the model that runs, if it has strategies; else the process.
"""

from collections.abc import Iterable
from functools import cache, partial

from torch import Tensor

from rekindle.offload.offloader import Offloader
from rekindle.offload.owners import OffloaderSet, current_owner, process_owner
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor, unpack
from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.held_tensor import Hooks
from rekindle.strategy import Offload, TierName
from rekindle.torch_private.version_counters import with_versions


@cache
def offload_for(decision: Decision) -> Offload:
    """Returns the strategy that carries out a decision."""
    if decision is Decision.OFFLOAD_FREELY:
        return Offload(derive=False)
    tier: TierName = "disk" if decision in (Decision.SPILL, Decision.SPILL_AS_PLANNED) else "host"
    return Offload(tier, quota=1.0, min_bytes=1, derive=False)


_PLANNED = frozenset(AS_PLANNED.values())


def offloader_of(decision: Decision, owner: OffloaderSet | None = None) -> Offloader:
    """Returns the offloader that carries out a decision for an owner; else for the current one."""
    owner = current_owner() if owner is None else owner
    return owner.find(decision, offload_for(decision), decision not in _PLANNED)


def hooks_of(decision: Decision) -> Hooks:
    """Returns the pack and unpack hooks that carry out a decision."""
    return offloader_of(decision).pack, unpack


def copy_out(decision: Decision, x: Tensor) -> OffloadedTensor | KeptTensor:
    """Take a tensor that nobody but the caller holds."""
    pack = partial(offloader_of(decision).pack, exclusive=True)
    saved: OffloadedTensor | KeptTensor = with_versions(pack, x)
    return saved


def end_planned_copy_outs(owner: OffloaderSet) -> None:
    """End the copy-outs of a plan, in eager and in compiled code: its model's backward begins."""
    for offloader in (*owner, *process_owner):
        if not offloader.limit_in_flight:
            offloader.on_backward_begin()


def pause(decisions: Iterable[Decision], failed: bool) -> None:
    """Begin the copy-outs that waited for the end of a region which made these decisions."""
    for decision in decisions:
        offloader_of(decision).pause(failed)
