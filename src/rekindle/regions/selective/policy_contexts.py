"""The two dispatch modes of a policy, as `create_selective_checkpoint_contexts` returns them.

`rekindle.checkpoint` takes the policy out of them and records the region instead of entering them;
a policy that is given as `context_fn` makes none. They also work by themselves, for whoever enters
them around a forward and its replay: torch's own engine, or subclasses in other people's code. Then
a result that is kept is cached in forward, and in the replay the op does not run and the cached
result is returned.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor

from rekindle.errors import CheckpointError
from rekindle.regions.selective.decisions import Decision, decision_of
from rekindle.regions.selective.eager_location import SelectiveCheckpointContext
from rekindle.torch_private.dispatch_modes import TorchDispatchMode, is_traced
from rekindle.torch_private.grad_mode import without_grad
from rekindle.torch_private.pytrees import tree_leaves, tree_map
from rekindle.torch_private.torch_checkpoint import SAC_IGNORED_OPS, TORCHS_MODES
from rekindle.torch_private.version_counters import detached, version_of


def contexts_of(
    policy: Any, allow_cache_entry_mutation: bool = False
) -> tuple["CachingMode", "CachedMode"]:
    """The two modes of one call of a region; torch's own while a graph is traced."""
    if is_traced():
        return _contexts_in_graphs[-1](policy)  # type: ignore[no-any-return]
    storage: dict[Any, dict[int, Any]] = defaultdict(dict)
    return CachingMode(policy, storage), CachedMode(policy, storage, allow_cache_entry_mutation)


_contexts_in_graphs: list[Callable[[Any], Any]] = []


def use_in_graphs(contexts: Callable[[Any], Any]) -> None:
    """Have `contexts(policy)` make the contexts while a graph is traced; called by `compile`."""
    _contexts_in_graphs.append(contexts)


def policy_in(contexts: tuple[Any, Any]) -> Any:
    """The policy of a pair of contexts that stands for one, ours or torch's; else None."""
    if tuple(map(type, contexts)) in (_OURS, TORCHS_MODES):
        return contexts[0].policy_fn
    return None


class PolicyState:
    """The state of one call of a region that policies get to see, beside the op."""

    def __init__(self, region: Any = None) -> None:
        self._region = None if region is None else ref(region)
        self._state: dict[Any, Any] = {}
        self._seen: defaultdict[int, int] = defaultdict(int)
        self.number = -1
        """Number of the op that runs, among those that can be run again."""

    def context(
        self, op: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_recompute: bool
    ) -> SelectiveCheckpointContext:
        """The context of one op, for a policy; counts the op."""
        key = id(op)
        index = self._seen[key]
        self._seen[key] = index + 1
        return SelectiveCheckpointContext(
            is_recompute=is_recompute,
            op_output=out,
            op=op,
            index=index,
            number=self.number,
            region=None if self._region is None else self._region(),
            state=self._state,
            args=args,
            kwargs=kwargs,
        )


class _SelectiveMode(TorchDispatchMode):
    """The base of the two modes."""

    supports_higher_order_operators = True

    def __init__(self, policy_fn: Any, storage: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy_fn = policy_fn
        self.storage = storage
        self._state = PolicyState()
        self._seen: defaultdict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._state = PolicyState()
        self._seen.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def _number(self, func: Any) -> int:
        """Number of runs of an op so far; counts one more."""
        number = self._seen[func]
        self._seen[func] += 1
        return number


class CachingMode(_SelectiveMode):
    """Caches the results that the policy keeps: entered around a forward."""

    def __init__(self, policy_fn: Any, storage: Any, ac_graph_id: Any = None) -> None:
        super().__init__(policy_fn, storage)
        self.ac_graph_id = ac_graph_id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        number = self._number(func)
        context = self._state.context(func, out, args, kwargs, is_recompute=False)
        answer = self.policy_fn(context, func, *args, **kwargs)
        if decision_of(answer) is not Decision.RECOMPUTE and any(map(_is_tensor, tree_leaves(out))):
            self.storage[func][number] = tree_map(_cached, out)
        return out


class CachedMode(_SelectiveMode):
    """Returns cached results in place of running their ops: entered around a replay."""

    def __init__(
        self, policy_fn: Any, storage: Any, allow_cache_entry_mutation: bool = False
    ) -> None:
        super().__init__(policy_fn, storage)
        self.allow_cache_entry_mutation = allow_cache_entry_mutation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        kept = self.storage[func]
        number = self._number(func)
        if number not in kept:
            return func(*args, **(kwargs or {}))
        return tree_map(self._uncached, kept[number])

    def _uncached(self, kept: Any) -> Any:
        if not isinstance(kept, _CachedTensor):
            return kept
        if not self.allow_cache_entry_mutation and version_of(kept.tensor) != kept.version:
            raise CheckpointError(
                f"A result that a selective policy kept, {kept.tensor.dtype} "
                f"{list(kept.tensor.shape)}, was changed in place since. Change a clone of it, or "
                "pass allow_cache_entry_mutation=True if the replay may see the change."
            )
        return without_grad(kept.tensor.detach)


_OURS = (CachingMode, CachedMode)


class _CachedTensor:
    """A kept tensor and the version it had."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = detached(tensor)
        self.version = version_of(tensor)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _cached(leaf: Any) -> Any:
    return _CachedTensor(leaf) if isinstance(leaf, Tensor) else leaf
