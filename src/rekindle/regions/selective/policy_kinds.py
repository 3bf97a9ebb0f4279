"""The classes of policies: values that compare, hash, and print as the code that makes them.

`rekindle.policies` is the vocabulary that makes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any
from weakref import ref

import torch

from rekindle.errors import RekindleError
from rekindle.regions.selective.decisions import FOR_TORCH, Decision, decision_of
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext, runs_one_of
from rekindle.regions.selective.op_addresses import PlannedDecisions, PlannedOpCounter
from rekindle.regions.selective.op_kinds import OpTraits
from rekindle.regions.selective.op_names import (
    OpSpec,
    cheap,
    code_of,
    format_op,
    is_op,
    matches,
    name_of,
    op_of,
)
from rekindle.regions.selective.op_sets import ATTENTION, MATMULS, REDUCTIONS, ROUTING
from rekindle.regions.selective.policy_contexts import contexts_of
from rekindle.torch_private.dynamo_frames import break_graph, called_outside_graphs
from rekindle.torch_private.torch_checkpoint import CheckpointPolicy

_WHY = "a policy is made in compiled code: make the policy before, once"
made_before = called_outside_graphs(_WHY)
"""Marks the functions that make policies."""


class Policy:
    """Decides about the results of ops. Join policies with `|`: the first to speak decides."""

    for_compiler: Callable[[], Any]
    """The policy as a function that `torch.compile` takes for a `context_fn`."""

    def __init_subclass__(cls) -> None:
        """Have classes of users work that use `fate` and `fate_of_name`, the names of before.

        A class may have them from a base that is no policy, and may call those of its bases.
        """
        super().__init_subclass__()
        for name, before in (("decide", "fate"), ("decide_named", "fate_of_name")):
            own = next(vars(base) for base in cls.__mro__ if {name, before} & vars(base).keys())
            method = own.get(name, own.get(before))
            setattr(cls, name, method)
            setattr(cls, before, method)

    def __post_init__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            break_graph(_WHY)
        # Weakly: a policy that is made for one call should go without the garbage collector.
        contexts = _as_function(ref(self), type(self), self._values())
        object.__setattr__(self, "for_compiler", contexts)

    def _values(self) -> tuple[Any, ...]:
        """The arguments that make an equal policy."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.init)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Policy":
        return self

    def __reduce__(self) -> Any:
        return type(self), self._values()

    by_number: Mapping[int, Decision] | None = None
    """Decisions by the number of an op in its region, if that alone decides, but `recompute`."""
    by_address: PlannedDecisions | None = None
    """Decisions by the address of an op in its block, if that alone decides, but `recompute`."""
    input_decision: Decision | None = None
    """The decision on the region's input, if a plan moves it."""
    op_traits: dict[int, OpTraits]
    """Of a policy by addresses: traits of ops by their ids, with the decision on names that it does
    not have."""

    def matches(self, ran: PlannedOpCounter, block: str) -> bool:  # noqa: ARG002
        """Returns whether a block ran what a policy by addresses was made for, after each call."""
        return True

    @property
    def by_op_alone(self) -> bool:
        """True if the op alone decides, so that an answer can be remembered."""
        return False

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        """The decision on what an op made; None for no opinion."""
        raise NotImplementedError

    def decide_named(self, name: str, ctx: SelectiveCheckpointContext) -> Decision | None:  # noqa: ARG002
        """The decision on a tensor that was given a name; None for no opinion."""
        return None

    fate, fate_of_name = decide, decide_named

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:  # noqa: ARG002
        """Returns whether an op's arguments are kept rather than what they were made from."""
        return False

    @made_before
    def __or__(self, other: "Policy | Callable[..., Any]") -> "Policy":
        parts = [part for policy in (self, of(other)) for part in _parts(policy)]
        return JoinedPolicy(tuple(parts))

    @made_before
    def __ror__(self, other: Callable[..., Any]) -> "Policy":
        return of(other) | self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a `context_fn` with nothing given; as a policy function with a context and an op."""
        if not args and not kwargs:
            return contexts_of(self)
        if len(args) < 2:
            raise TypeError("A policy is called with a context, an op and the op's arguments")
        ctx, op, *rest = args
        if not isinstance(ctx, SelectiveCheckpointContext):
            ctx = SelectiveCheckpointContext(
                is_recompute=ctx.is_recompute,
                op_output=getattr(ctx, "op_output", None),
                op=op,
                args=tuple(rest),
                kwargs=kwargs,
            )
        return FOR_TORCH[self.decide(ctx) or Decision.RECOMPUTE]


def _as_function(
    weak: "ref[Policy]", kind: type[Policy], values: tuple[Any, ...]
) -> Callable[[], Any]:
    """A policy as a function that gives contexts, also when the policy itself is gone.

    Equal policies share a graph, and the graph may outlive the policy that it was traced with.
    """

    def contexts() -> Any:
        policy = weak()
        return contexts_of(kind(*values) if policy is None else policy)

    return contexts


def _parts(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, JoinedPolicy) else (policy,)


@dataclass(frozen=True)
class JoinedPolicy(Policy):
    """Several policies: the first with an opinion decides."""

    policies: tuple[Policy, ...]

    @property
    def by_op_alone(self) -> bool:
        return all(policy.by_op_alone for policy in self.policies)

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        for policy in self.policies:
            decision = policy.decide(ctx)
            if decision is not None:
                return decision
        return None

    def decide_named(self, name: str, ctx: SelectiveCheckpointContext) -> Decision | None:
        decisions = (policy.decide_named(name, ctx) for policy in self.policies)
        return next((decision for decision in decisions if decision is not None), None)

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return any(policy.keeps_inputs(ctx) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True)
class OpsPolicy(Policy):
    """One decision for some ops, or for all."""

    then: Decision
    ops: frozenset[OpSpec] | None
    _codes: dict[CodeType, set[Any]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        codes: dict[CodeType, set[Any]] = {}
        for op in self.ops or ():
            if isinstance(op, type):
                codes.setdefault(code_of(op), set()).add(op)
        object.__setattr__(self, "_codes", codes)
        super().__post_init__()

    @property
    def by_op_alone(self) -> bool:
        return not self._codes

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        if self.ops is None or matches(ctx.op, self.ops):
            return self.then
        if self._codes and runs_one_of(self._codes):
            return self.then
        return None

    def __reduce__(self) -> Any:
        return _ops_again, (self.then, None if self.ops is None else _portable(self.ops))

    def __repr__(self) -> str:
        return f"{self.then.value}({'' if self.ops is None else _shown(self.ops)})"


def _shown(ops: frozenset[OpSpec]) -> str:
    """Ops as code; sets that have a name by their name."""
    sets = {
        "MATMULS": MATMULS,
        "ATTENTION": ATTENTION,
        "REDUCTIONS": REDUCTIONS,
        "ROUTING": ROUTING,
    }
    named = [name for name, members in sets.items() if members <= ops]
    rest = ops.difference(*(sets[name] for name in named))
    return ", ".join([*named, *sorted(map(format_op, rest))])


def _portable(ops: frozenset[OpSpec]) -> list[Any]:
    """Ops in a form that can be pickled: names, and classes."""
    return [name_of(op) for op in ops]


def _ops_again(decision: Decision, ops: list[Any] | None) -> Policy:
    return OpsPolicy(decision, None if ops is None else frozenset(map(op_of, ops)))


@dataclass(frozen=True, repr=False)
class CheapOpsPolicy(Policy):
    """Recompute results of cheap ops, keep the rest."""

    @property
    def by_op_alone(self) -> bool:
        return True

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        return Decision.RECOMPUTE if cheap(ctx.op) else Decision.KEEP

    def __repr__(self) -> str:
        return "recompute_cheap"


@dataclass(frozen=True)
class KeepInputsPolicy(Policy):
    """Keep the arguments of some ops."""

    ops: frozenset[OpSpec]

    @property
    def by_op_alone(self) -> bool:
        return True

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:  # noqa: ARG002
        return None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return matches(ctx.op, self.ops)

    def __reduce__(self) -> Any:
        return _inputs_again, (_portable(self.ops),)

    def __repr__(self) -> str:
        return f"keep_inputs({_shown(self.ops)})"


def _inputs_again(ops: list[Any]) -> Policy:
    return KeepInputsPolicy(frozenset(map(op_of, ops)))


@dataclass(frozen=True)
class PathPolicy(Policy):
    """A policy for the ops of some modules."""

    pattern: str
    then: Policy

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        return self.then.decide(ctx) if is_at(ctx.module_path, self.pattern) else None

    def decide_named(self, name: str, ctx: SelectiveCheckpointContext) -> Decision | None:
        decision = self.then.decide_named(name, ctx)
        return decision if decision is not None and is_at(ctx.module_path, self.pattern) else None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return self.then.keeps_inputs(ctx) and is_at(ctx.module_path, self.pattern)

    def __repr__(self) -> str:
        return f"at({self.pattern!r}, {self.then!r})"


def is_at(path: str, pattern: str) -> bool:
    """Returns whether a module's path, or the path of one around it, ends as the pattern says."""
    parts, wanted = path.split("."), pattern.split(".")
    length = len(wanted)
    return any(
        all(map(fnmatchcase, parts[start : start + length], wanted))
        for start in range(len(parts) - length + 1)
    )


@dataclass(frozen=True)
class NamedPolicy(Policy):
    """One decision for tensors and functions with certain names."""

    then: Decision
    wanted: tuple[str, ...]

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        return self.then if any(self.decide_named(name, ctx) for name in ctx.names) else None

    def decide_named(self, name: str, ctx: SelectiveCheckpointContext) -> Decision | None:  # noqa: ARG002
        return self.then if any(fnmatchcase(name, wanted) for wanted in self.wanted) else None

    def __repr__(self) -> str:
        return f"named({', '.join(map(repr, self.wanted))}, fate={self.then.value!r})"


@dataclass(frozen=True)
class CountedPolicy(Policy):
    """A policy for some of the ops that it has an opinion on, counted in each call of a region."""

    step: int | None
    limit: int | None
    then: Policy

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        decision = self.then.decide(ctx)
        return decision if decision is not None and self._is_one(ctx) else None

    def decide_named(self, name: str, ctx: SelectiveCheckpointContext) -> Decision | None:
        decision = self.then.decide_named(name, ctx)
        return decision if decision is not None and self._is_one(ctx) else None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return self.then.keeps_inputs(ctx) and self._is_one(ctx)

    def _is_one(self, ctx: SelectiveCheckpointContext) -> bool:
        """Count an op, and return whether it is one to decide about; equal policies count apart."""
        count: int = ctx.state.get(id(self), 0)
        ctx.state[id(self)] = count + 1
        return count < self.limit if self.limit is not None else count % (self.step or 1) == 0

    def __repr__(self) -> str:
        if self.limit is not None:
            return f"first({self.limit}, {self.then!r})"
        return f"every({self.step}, {self.then!r})"


@dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A user's own function of a context, an op and its arguments."""

    function: Callable[..., Any]

    def decide(self, ctx: SelectiveCheckpointContext) -> Decision | None:
        try:
            answer = self.function(ctx, ctx.op, *ctx.args, **ctx.kwargs)
        except TypeError as error:  # which Python would take for one of the operator in `a @ b`
            raise RekindleError(f"The policy {self!r} failed on {ctx.op}: {error}") from error
        if answer is CheckpointPolicy.PREFER_SAVE and ctx.is_compiled:
            return Decision.PREFER_KEEP
        return None if answer is None else decision_of(answer)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@made_before
def of(policy: Any) -> Policy:
    """A policy from what torch takes for one: a function `(ctx, op, *args)`, or a list of ops."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, list | tuple | set | frozenset):
        return OpsPolicy(Decision.KEEP, frozenset(map(op_of, policy)))
    if callable(policy) and not is_op(policy):
        return FunctionPolicy(policy)
    given = repr(policy) if is_op(policy) else type(policy).__name__
    raise TypeError(
        f"A policy is a value of rekindle.policies, a function or a list of ops, but got {given}"
    )
