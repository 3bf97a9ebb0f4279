"""Carries out an option: what `rekindle.apply` gives the block."""

from rekindle.planner.types import Option
from rekindle.policies import Policy
from rekindle.regions.selective.planned_ops import policy_of
from rekindle.strategy import NumberedOps, PlannedOps, SavedIndices


def what_of(option: Option) -> str | Policy | SavedIndices:
    """The strategy of a block that runs by an option."""
    if option.fate == "derive":
        return SavedIndices(option.derived, option.offloaded, option.tier, option.saves)
    if option.fate != "select":
        return option.fate
    if option.kept_ops or option.offloaded_ops:
        kept, offloaded = sorted(option.kept_ops), sorted(option.offloaded_ops)
        return policy_of(PlannedOps(tuple(kept), tuple(offloaded), option.tier))
    return policy_of(NumberedOps(option.kept, option.offloaded, option.tier))
