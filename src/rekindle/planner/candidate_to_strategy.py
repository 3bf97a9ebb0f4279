"""Carries out a planned strategy: what `rekindle.apply` gives the block."""

from rekindle.policies import Policy
from rekindle.regions.selective.planned_ops import policy_of
from rekindle.strategy import (
    Keep,
    NumberedOps,
    PlannedOps,
    Recompute,
    SavedIndices,
    Selective,
    Strategy,
)


def what_of(strategy: Strategy) -> str | Policy | SavedIndices:
    """The strategy of a plan, as `modules.apply_strategies.apply` takes it."""
    match strategy:
        case Keep():
            return "keep"
        case Recompute():
            return "recompute"
        case SavedIndices():
            return strategy
        case Selective(policy=PlannedOps(kept=(), offloaded=(), tier=tier)):
            return policy_of(NumberedOps(tier=tier))
        case Selective(policy=PlannedOps() | NumberedOps() as policy):
            return policy_of(policy)
    raise TypeError(f"A plan has no such strategy: {strategy!r}")
