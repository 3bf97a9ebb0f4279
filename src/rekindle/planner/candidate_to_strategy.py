"""Carries out an option: what `rekindle.apply` gives the block."""

import warnings
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from rekindle.offload.offload_options import FATE_OF_TIER, TierName
from rekindle.planner.types import Option
from rekindle.policies import Policy
from rekindle.regions.saved_indices import Saves
from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.regions.selective.op_addresses import (
    AddressBook,
    OpAddress,
    PlannedDecisions,
    depends_on_parameters_alone,
    is_parameter,
)


@dataclass(frozen=True)
class Addressed(Policy):
    """Decisions by the addresses of ops in their block: Note [Numbers that no cast can shift].

    A block that no longer runs the ops that it ran when the plan was made is told of once; then
    nothing is kept by an address that may mean another op than it did.
    """

    kept: frozenset[OpAddress]
    offloaded: frozenset[OpAddress]
    tier: TierName = "host"
    _doubtful: set[str] = field(init=False, repr=False, compare=False)
    """Names of ops that did not run as in the block that was planned."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_address", self._fates(frozenset()))
        object.__setattr__(self, "_doubtful", set())
        super().__post_init__()

    def _fates(self, but: AbstractSet[str]) -> PlannedDecisions:
        """The fates by address of all ops but some."""
        fates: dict[str, dict[int, tuple[str, Decision]]] = {}
        away = dict.fromkeys(self.offloaded, AS_PLANNED[self.tier])
        for address, fate in {**dict.fromkeys(self.kept, Decision.KEEP), **away}.items():
            if address.op not in but:
                fates.setdefault(address.op, {})[address.index] = address.module, fate
        return fates

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        """The fate of what an op made, where no region counts: under a compiler, or in a mode."""
        assert self.by_address is not None, "it was made with the policy"
        name = ctx.op.name() if hasattr(ctx.op, "name") else str(ctx.op)
        given = [*ctx.args, *ctx.kwargs.values()]
        if name not in self.by_address or depends_on_parameters_alone(given, is_parameter):
            return Decision.RECOMPUTE
        counts = ctx.state.setdefault(id(self), Counter())
        counts[name] += 1
        _, fate = self.by_address[name].get(counts[name] - 1, ("", Decision.RECOMPUTE))
        return fate

    def matches(self, ran: AddressBook, block: str) -> bool:
        """Whether the ops of one call of the block ran as when the plan was made."""
        expected = {address.op: address for address in sorted(self.kept | self.offloaded)}
        wrong = [
            op
            for op, address in expected.items()
            if op in ran.counts and (ran.counts[op] != address.count or op in ran.strays)
        ]
        if wrong and not self._doubtful:
            op = wrong[0]
            found = f"{ran.counts[op]} times"
            if op in ran.strays:
                found += f", this one in {ran.strays[op] or 'the block itself'}"
            warnings.warn(_no_longer_matches(block, expected[op], found), stacklevel=2)
        if wrong:
            self._doubtful.update(wrong)
            object.__setattr__(self, "by_address", self._fates(self._doubtful))
        return not wrong

    def __repr__(self) -> str:
        parts = [("keep", self.kept), (FATE_OF_TIER[self.tier], self.offloaded)]
        told = [f"{word} {', '.join(map(str, sorted(ops)))}" for word, ops in parts if ops]
        return f"<{'; '.join([*told, 'recompute the rest'])}>"


def _no_longer_matches(block: str, expected: OpAddress, found: str) -> str:
    return (
        f"The plan no longer matches a {block}: it was made for {expected}, but {expected.op} ran "
        f"{found}. From now on the results of that op are recomputed there rather than kept. "
        "Gradients are right; memory and time may differ from the plan. Fit the model again."
    )


@dataclass(frozen=True)
class Numbered(Policy):
    """Decisions by the number that an op has in its region: of old plan files.

    Numbers count every op that can be run again, casts of parameters included, so under autocast
    they may mean other ops than when the plan was made.
    """

    kept: frozenset[int]
    offloaded: frozenset[int]
    tier: TierName = "host"

    def __post_init__(self) -> None:
        away = dict.fromkeys(self.offloaded, AS_PLANNED[self.tier])
        object.__setattr__(self, "by_number", {**dict.fromkeys(self.kept, Decision.KEEP), **away})
        super().__post_init__()

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        assert self.by_number is not None, "it was made with the policy"
        return self.by_number.get(ctx.number, Decision.RECOMPUTE)

    def __repr__(self) -> str:
        parts = [("keep", self.kept), (FATE_OF_TIER[self.tier], self.offloaded)]
        told = [f"{word} ops {sorted(numbers)}" for word, numbers in parts if numbers]
        return f"<{', '.join([*told, 'recompute the rest'])}>"


def what_of(option: Option) -> str | Policy | Saves:
    """The fate or the policy of a block that runs by an option."""
    if option.fate == "derive":
        numbers = frozenset(option.derived), frozenset(option.offloaded)
        return Saves(*numbers, option.tier, option.saves)
    if option.fate != "select":
        return option.fate
    if option.kept_ops or option.offloaded_ops:
        ops = frozenset(option.kept_ops), frozenset(option.offloaded_ops)
        return Addressed(*ops, option.tier)
    return Numbered(frozenset(option.kept), frozenset(option.offloaded), option.tier)
