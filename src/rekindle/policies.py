"""Policies as values: which results of a region's ops are kept, recomputed, offloaded or spilled.

A policy is comparable, hashable and prints as the code that makes it. Policies are joined with `|`:
the first that has something to say about an op decides, and what none speaks of is recomputed.

    from rekindle import policies
    from rekindle.policies import at, every, keep, named, offload

    rekindle.checkpoint(block, x, context_fn=policies.keep_matmuls_and_attention)
    rekindle.checkpoint(block, x, context_fn=at("mlp", offload(MATMULS)) | keep(MATMULS))
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from types import CodeType
from typing import Any
from weakref import ref

import torch

from rekindle.compiled.frames import break_graph
from rekindle.errors import RekindleError
from rekindle.selective.contexts import contexts_of
from rekindle.selective.fates import FOR_TORCH, Fate, fate_named, fate_of
from rekindle.selective.ops import Op, cheap, code_of, is_op, matches, name_of, op_of, show
from rekindle.selective.where import SelectiveCheckpointContext, runs_one_of

__all__ = [
    "ATTENTION",
    "MATMULS",
    "REDUCTIONS",
    "ROUTING",
    "Policy",
    "at",
    "every",
    "first",
    "keep",
    "keep_attention",
    "keep_inputs",
    "keep_matmuls",
    "keep_matmuls_and_attention",
    "keep_routing",
    "named",
    "of",
    "offload",
    "recompute",
    "recompute_cheap",
    "spill",
]


class Policy:
    """Gives the results of ops their fates. Join policies with `|`: the first to speak decides."""

    for_compiler: Callable[[], Any]
    """The policy as a function that `torch.compile` takes for a `context_fn`."""

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            break_graph(f"{self!r} is made in compiled code: make the policy before, once")
        # Weakly: a policy that is made for one call should go without the garbage collector.
        object.__setattr__(self, "for_compiler", _as_function(ref(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Policy":
        return self

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)  # type: ignore[arg-type]

    @property
    def by_op_alone(self) -> bool:
        """Whether the op alone decides, so that an answer can be remembered."""
        return False

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        """The fate of what an op made; None for no opinion."""
        raise NotImplementedError

    def fate_of_name(self, name: str, ctx: SelectiveCheckpointContext) -> Fate | None:  # noqa: ARG002
        """The fate of a tensor that was given a name; None for no opinion."""
        return None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:  # noqa: ARG002
        """Whether what an op is given is kept rather than what that was made from."""
        return False

    def __or__(self, other: "Policy | Callable[..., Any]") -> "Policy":
        parts = [part for policy in (self, of(other)) for part in _parts(policy)]
        return _FirstToSpeak(tuple(parts))

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
        return FOR_TORCH[self.fate(ctx) or Fate.RECOMPUTE]


def _as_function(weak: "ref[Policy]") -> Callable[[], Any]:
    def contexts() -> Any:
        return contexts_of(weak())

    return contexts


def _parts(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, _FirstToSpeak) else (policy,)


@dataclass(frozen=True)
class _FirstToSpeak(Policy):
    """Several policies: the first with an opinion decides."""

    policies: tuple[Policy, ...]

    @property
    def by_op_alone(self) -> bool:
        return all(policy.by_op_alone for policy in self.policies)

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        for policy in self.policies:
            fate = policy.fate(ctx)
            if fate is not None:
                return fate
        return None

    def fate_of_name(self, name: str, ctx: SelectiveCheckpointContext) -> Fate | None:
        fates = (policy.fate_of_name(name, ctx) for policy in self.policies)
        return next((fate for fate in fates if fate is not None), None)

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return any(policy.keeps_inputs(ctx) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


@dataclass(frozen=True)
class _Ops(Policy):
    """One fate for some ops, or for all of them."""

    then: Fate
    ops: frozenset[Op] | None
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

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        if self.ops is None or matches(ctx.op, self.ops):
            return self.then
        if self._codes and runs_one_of(self._codes):
            return self.then
        return None

    def __reduce__(self) -> Any:
        return _ops_again, (self.then, None if self.ops is None else _portable(self.ops))

    def __repr__(self) -> str:
        return f"{self.then.value}({'' if self.ops is None else _shown(self.ops)})"


def _shown(ops: frozenset[Op]) -> str:
    """Ops as code, sets that have a name by their name."""
    sets = {
        "MATMULS": MATMULS,
        "ATTENTION": ATTENTION,
        "REDUCTIONS": REDUCTIONS,
        "ROUTING": ROUTING,
    }
    named = [name for name, members in sets.items() if members <= ops]
    rest = ops.difference(*(sets[name] for name in named))
    return ", ".join([*named, *sorted(map(show, rest))])


def _portable(ops: frozenset[Op]) -> list[Any]:
    """Ops as what can be pickled: names, and classes."""
    return [name_of(op) for op in ops]


def _ops_again(fate: Fate, ops: list[Any] | None) -> Policy:
    return _Ops(fate, None if ops is None else frozenset(map(op_of, ops)))


def keep(*ops: Any) -> Policy:
    """Keep what these ops make; what every op makes, with none given.

    An op is `torch.ops.aten.mm`, which stands for all its overloads, `torch.ops.aten.mm.default`,
    its name (`"aten::mm"`), a higher-order operator, or an `autograd.Function`, which stands for
    all that its forward does. Collections of them can be given too.

    >>> keep("aten::mm") | offload(torch.ops.aten.addmm)
    keep('aten::mm') | offload('aten::addmm')
    """
    return _some(Fate.KEEP, ops)


def recompute(*ops: Any) -> Policy:
    """Recompute what these ops make; what every op makes, with none given."""
    return _some(Fate.RECOMPUTE, ops)


def offload(*ops: Any) -> Policy:
    """Send what these ops make to host memory; what is there already stays."""
    return _some(Fate.OFFLOAD, ops)


def spill(*ops: Any) -> Policy:
    """Send what these ops make to disk."""
    return _some(Fate.SPILL, ops)


def _some(fate: Fate, ops: tuple[Any, ...]) -> Policy:
    return _Ops(fate, _ops(ops) if ops else None)


def _ops(ops: tuple[Any, ...]) -> frozenset[Op]:
    found: list[Op] = []
    for op in ops:
        many = isinstance(op, list | tuple | set | frozenset)
        found += map(op_of, op) if many else [op_of(op)]
    return frozenset(found)


@dataclass(frozen=True, repr=False)
class _Cheap(Policy):
    """Recompute what is cheap, keep the rest."""

    @property
    def by_op_alone(self) -> bool:
        return True

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        return Fate.RECOMPUTE if cheap(ctx.op) else Fate.KEEP

    def __repr__(self) -> str:
        return "recompute_cheap"


@dataclass(frozen=True)
class _Inputs(Policy):
    """Keep what some ops are given."""

    ops: frozenset[Op]

    @property
    def by_op_alone(self) -> bool:
        return True

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:  # noqa: ARG002
        return None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return matches(ctx.op, self.ops)

    def __reduce__(self) -> Any:
        return keep_inputs, tuple(_portable(self.ops))

    def __repr__(self) -> str:
        return f"keep_inputs({_shown(self.ops)})"


def keep_inputs(*ops: Any) -> Policy:
    """Keep what these ops are given, where that takes no more memory than what it is made from.

    Queries and keys with rotary positions are as large as the products they come from: kept in
    their place, they need not be rotated again.

    >>> keep_inputs("aten::_scaled_dot_product_flash_attention")
    keep_inputs('aten::_scaled_dot_product_flash_attention')
    """
    return _Inputs(_ops(ops))


@dataclass(frozen=True)
class _At(Policy):
    """A policy for the ops of some modules."""

    pattern: str
    then: Policy

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        return self.then.fate(ctx) if is_at(ctx.module_path, self.pattern) else None

    def fate_of_name(self, name: str, ctx: SelectiveCheckpointContext) -> Fate | None:
        fate = self.then.fate_of_name(name, ctx)
        return fate if fate is not None and is_at(ctx.module_path, self.pattern) else None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return self.then.keeps_inputs(ctx) and is_at(ctx.module_path, self.pattern)

    def __repr__(self) -> str:
        return f"at({self.pattern!r}, {self.then!r})"


def is_at(path: str, pattern: str) -> bool:
    """Whether a module's path, or the path of one it is part of, ends as the pattern says."""
    parts, wanted = path.split("."), pattern.split(".")
    length = len(wanted)
    return any(
        all(map(fnmatchcase, parts[start : start + length], wanted))
        for start in range(len(parts) - length + 1)
    )


def at(pattern: str, policy: "Policy | str") -> Policy:
    """A policy, or a fate, for the ops that run in some modules and in what these contain.

    The pattern names parts of a module's path, with the wildcards of file names within a part:
    `"layers.*.mlp"`, `"mlp"`, `"layers.[0-3]"`. Paths begin at the outermost module that is called.

    >>> at("layers.*.mlp", "keep")
    at('layers.*.mlp', keep())
    """
    if not isinstance(pattern, str) or not pattern or "" in pattern.split("."):
        raise ValueError(f'A pattern is like "layers.*.mlp", but got {pattern!r}')
    return _At(pattern, _policy(policy))


def _policy(policy: Any) -> Policy:
    return _Ops(fate_named(policy), None) if isinstance(policy, str) else of(policy)


@dataclass(frozen=True)
class _Named(Policy):
    """One fate for tensors and functions with certain names."""

    then: Fate
    wanted: tuple[str, ...]

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        return self.then if any(self.fate_of_name(name, ctx) for name in ctx.names) else None

    def fate_of_name(self, name: str, ctx: SelectiveCheckpointContext) -> Fate | None:  # noqa: ARG002
        return self.then if any(fnmatchcase(name, wanted) for wanted in self.wanted) else None

    def __repr__(self) -> str:
        return f"named({', '.join(map(repr, self.wanted))}, fate={self.then.value!r})"


def named(*names: str, fate: str = "keep") -> Policy:
    """A fate for the tensors and functions that were given these names by `rekindle.name`.

    >>> named("attn_out", "mlp_*", fate="offload")
    named('attn_out', 'mlp_*', fate='offload')
    """
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"named() takes the names of tensors, but got {names!r}")
    return _Named(fate_named(fate), names)


@dataclass(frozen=True)
class _Counted(Policy):
    """A policy for some of the ops that it speaks of, counted anew in each call of a region."""

    step: int | None
    limit: int | None
    then: Policy

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        fate = self.then.fate(ctx)
        return fate if fate is not None and self._is_one(ctx) else None

    def fate_of_name(self, name: str, ctx: SelectiveCheckpointContext) -> Fate | None:
        fate = self.then.fate_of_name(name, ctx)
        return fate if fate is not None and self._is_one(ctx) else None

    def keeps_inputs(self, ctx: SelectiveCheckpointContext) -> bool:
        return self.then.keeps_inputs(ctx) and self._is_one(ctx)

    def _is_one(self, ctx: SelectiveCheckpointContext) -> bool:
        """Count, and say whether this one counts; equal policies in two places count apart."""
        count: int = ctx.state.get(id(self), 0)
        ctx.state[id(self)] = count + 1
        return count < self.limit if self.limit is not None else count % (self.step or 1) == 0

    def __repr__(self) -> str:
        if self.limit is not None:
            return f"first({self.limit}, {self.then!r})"
        return f"every({self.step}, {self.then!r})"


def first(n: int, policy: Policy) -> Policy:
    """A policy, for the first `n` ops of a region that it speaks of."""
    return _Counted(None, _count(n), of(policy))


def every(n: int, policy: Policy) -> Policy:
    """A policy, for every `n`-th op of a region that it speaks of, beginning with the first.

    >>> every(2, keep("aten::mm"))
    every(2, keep('aten::mm'))
    """
    return _Counted(_count(n), None, of(policy))


def _count(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"n should be a whole number from 1 on, but got {n!r}")
    return n


@dataclass(frozen=True)
class _Function(Policy):
    """A user's own function of a context, an op and its arguments."""

    function: Callable[..., Any]

    def fate(self, ctx: SelectiveCheckpointContext) -> Fate | None:
        try:
            answer = self.function(ctx, ctx.op, *ctx.args, **ctx.kwargs)
        except TypeError as error:  # which Python would take for one of the operator in `a @ b`
            raise RekindleError(f"The policy {self!r} failed on {ctx.op}: {error}") from error
        return None if answer is None else fate_of(answer)

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def of(policy: Any) -> Policy:
    """A policy from what torch takes for one: a function `(ctx, op, *args)`, or a list of ops."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, list | tuple | set | frozenset):
        return _Ops(Fate.KEEP, frozenset(map(op_of, policy)))
    if callable(policy) and not is_op(policy):
        return _Function(policy)
    given = repr(policy) if is_op(policy) else type(policy).__name__
    raise TypeError(
        f"A policy is a value of rekindle.policies, a function or a list of ops, but got {given}"
    )


_aten = torch.ops.aten


def _known(*names: str) -> frozenset[Op]:
    """Those of the ops that this version of torch has."""
    return frozenset(getattr(_aten, name) for name in names if hasattr(_aten, name))


MATMULS = _known(
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "linear", "matmul"),
    *("convolution", "_convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *("_int_mm", "mkldnn_linear", "_trilinear"),
)
"""Ops that compute: matrix products and convolutions."""

ATTENTION = _known(
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math"),
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
    "scaled_dot_product_attention",
) | frozenset([torch.ops.higher_order.flex_attention])
"""Fused attention, whichever backend does it, and flex attention."""

ROUTING = _known("topk", "sort", "argsort", "argmax", "kthvalue", "multinomial", "bucketize")
"""Ops whose results decide where tokens go: near a tie, another bit would be another route."""

REDUCTIONS = _known(
    *("sum", "mean", "var", "var_mean", "std", "std_mean", "amax", "amin", "norm", "logsumexp"),
    "linalg_vector_norm",
)
"""Ops that make little of much: to keep their results takes next to nothing, and saves reading what
they were made from once more."""

_SMALL = ROUTING | REDUCTIONS
keep_routing = keep(ROUTING)
"""Keep what decides the routes of a mixture of experts; a part of the policies below."""
keep_matmuls = keep(MATMULS | _SMALL)
"""Keep what matrix products and convolutions make; recompute the cheap ops between them."""
keep_attention = keep(ATTENTION | _SMALL)
"""Keep what fused attention makes."""
keep_matmuls_and_attention = keep(MATMULS | ATTENTION | _SMALL) | keep_inputs(ATTENTION)
"""Keep whatever takes compute; recompute only what memory bandwidth bounds."""
recompute_cheap = _Cheap()
"""Keep all that any op makes, but for pointwise ops, casts, norms, reductions and the like."""
