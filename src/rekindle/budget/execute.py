"""Carries out an option: what `rekindle.apply` gives the block."""

from dataclasses import dataclass

from rekindle.budget.values import Option
from rekindle.offload.options import FATE_OF_TIER, TierName
from rekindle.policies import Policy
from rekindle.selective.by_save import Saves
from rekindle.selective.fates import AS_PLANNED, Fate
from rekindle.selective.where import SelectiveCheckpointContext


@dataclass(frozen=True)
class Numbered(Policy):
    """Fates by the number that an op has in its region."""

    kept: frozenset[int]
    offloaded: frozenset[int]
    tier: TierName = "host"

    def __post_init__(self) -> None:
        away = dict.fromkeys(self.offloaded, AS_PLANNED[self.tier])
        object.__setattr__(self, "by_number", {**dict.fromkeys(self.kept, Fate.KEEP), **away})
        super().__post_init__()

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        assert self.by_number is not None, "it was made with the policy"
        return self.by_number.get(ctx.number, Fate.RECOMPUTE)

    def __repr__(self) -> str:
        parts = [("keep", self.kept), (FATE_OF_TIER[self.tier], self.offloaded)]
        told = [f"{word} ops {sorted(numbers)}" for word, numbers in parts if numbers]
        return f"<{', '.join([*told, 'recompute the rest'])}>"


def what_of(option: Option) -> str | Policy | Saves:
    """The fate or the policy of a block that runs by an option."""
    if option.fate == "derive":
        return Saves(frozenset(option.derived), frozenset(option.offloaded), option.tier)
    if option.fate != "select":
        return option.fate
    return Numbered(frozenset(option.kept), frozenset(option.offloaded), option.tier)
