"""Policies of plans: decisions by the addresses, or the numbers, of ops that a plan measured.

`strategy.PlannedOps` and `strategy.NumberedOps` are the values; `policy_of` makes the policy that
runs a region by one.
"""

import warnings
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from rekindle.regions.selective.decisions import AS_PLANNED, Decision
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.regions.selective.op_addresses import (
    PlannedDecisions,
    PlannedOpCounter,
    depends_on_parameters_alone,
    is_parameter,
)
from rekindle.regions.selective.policy_kinds import Policy
from rekindle.strategy import WORD_OF_TIER, NumberedOps, OpAddress, PlannedOps


def policy_of(planned: PlannedOps | NumberedOps) -> Policy:
    """The policy of one block that runs by a plan.

    Each block needs a policy of its own: a policy by addresses changes when its block no longer
    runs the ops that it was planned for.
    """
    if isinstance(planned, PlannedOps):
        return PlannedOpsPolicy(planned)
    return NumberedOpsPolicy(planned)


@dataclass(frozen=True)
class PlannedOpsPolicy(Policy):
    """Decisions by the addresses of ops in their block: Note [Numbers that no cast can shift].

    If a block no longer runs the ops that it ran when the plan was made, a warning says so, once;
    from then on no result of such an op is kept, since its address may mean another op.
    """

    planned: PlannedOps
    _doubtful: set[str] = field(init=False, repr=False, compare=False)
    """Names of ops that did not run as in the block that was planned."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_doubtful", set())
        object.__setattr__(self, "op_traits", {})
        if self.planned.moves_input:
            object.__setattr__(self, "input_decision", AS_PLANNED[self.planned.tier])
        object.__setattr__(self, "by_address", self._decisions(without=frozenset()))
        super().__post_init__()

    def _decisions(self, without: AbstractSet[str]) -> PlannedDecisions:
        """Decisions by address, but for ops of some names."""
        decisions: dict[str, dict[int, tuple[str, Decision]]] = {}
        for address, decision in _by_key(self.planned).items():
            if address.op not in without:
                decisions.setdefault(address.op, {})[address.index] = address.module, decision
        return decisions

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        """The decision where no region counts ops: under a compiler, or in a dispatch mode."""
        assert self.by_address is not None, "it was made with the policy"
        name = ctx.op.name() if hasattr(ctx.op, "name") else str(ctx.op)
        given = [*ctx.args, *ctx.kwargs.values()]
        if name not in self.by_address or depends_on_parameters_alone(given, is_parameter):
            return Decision.RECOMPUTE
        counts = ctx.state.setdefault(id(self), Counter())
        counts[name] += 1
        _, decision = self.by_address[name].get(counts[name] - 1, ("", Decision.RECOMPUTE))
        return decision

    def matches(self, ran: PlannedOpCounter, block: str) -> bool:
        """True if the ops of one call of the block ran as when the plan was made."""
        planned = (*self.planned.kept, *self.planned.offloaded)
        expected = {address.op: address for address in sorted(planned)}
        wrong = [
            op
            for op, address in expected.items()
            if op in ran.counts and (ran.counts[op] != address.count or op in ran.misplaced)
        ]
        if wrong and not self._doubtful:
            op = wrong[0]
            found = f"{ran.counts[op]} times"
            if op in ran.misplaced:
                found += f", this one in {ran.misplaced[op] or 'the block itself'}"
            warnings.warn(_no_longer_matches(block, expected[op], found), stacklevel=2)
        if wrong:
            self._doubtful.update(wrong)
            object.__setattr__(self, "by_address", self._decisions(without=self._doubtful))
        return not wrong

    def __repr__(self) -> str:
        return str(self.planned)


def _no_longer_matches(block: str, expected: OpAddress, found: str) -> str:
    return (
        f"The plan no longer matches a {block}: it was made for {expected}, but {expected.op} ran "
        f"{found}. From now on the results of that op are recomputed there rather than kept. "
        "Gradients are right; memory and time may differ from the plan. Fit the model again."
    )


@dataclass(frozen=True)
class NumberedOpsPolicy(Policy):
    """Decisions by the number that an op has in its region: of plan files without addresses.

    Numbers count every op that can be run again, casts of parameters included, so under autocast
    they may mean other ops than when the plan was made.
    """

    planned: NumberedOps

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_number", _by_key(self.planned))
        super().__post_init__()

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        assert self.by_number is not None, "it was made with the policy"
        return self.by_number.get(ctx.number, Decision.RECOMPUTE)

    def __repr__(self) -> str:
        parts = _parts(self.planned)
        texts = [f"{word} ops {sorted(numbers)}" for word, numbers in parts if numbers]
        return f"<{', '.join([*texts, 'recompute the rest'])}>"


def _by_key(planned: PlannedOps | NumberedOps) -> dict[Any, Decision]:
    """Decisions that are not `recompute`, by the address or the number of each op."""
    moved = dict.fromkeys(planned.offloaded, AS_PLANNED[planned.tier])
    return {**dict.fromkeys(planned.kept, Decision.KEEP), **moved}


def _parts(planned: PlannedOps | NumberedOps) -> list[tuple[str, tuple[Any, ...]]]:
    """Words for what is done with ops, each with its ops."""
    return [("keep", planned.kept), (WORD_OF_TIER[planned.tier], planned.offloaded)]
