"""The private parts of autograd and of `torch._C` that the engines touch.

The switches, torch's own values, are in `switches`, the attention kernels in `ambient`.

Each is used as it is, tried on torch 2.11 and 2.13. Names are bound once, because the engines call
them on their hot paths.

Note [In one call]. Python runs signal handlers, and so raises `KeyboardInterrupt`, when a function
of Python's begins, after any call, and when a loop jumps back; not inside a function of C. So what
must happen wholly or not at all is done by one call into C: `tuple(map(function, values))`.
"""

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_T = TypeVar("_T")
_autograd = torch._C._autograd

push_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = (
    _autograd._push_saved_tensors_default_hooks
)
"""Make a pair of saved-tensor hooks the top one. Public form, at four times the cost:
`torch.autograd.graph.saved_tensors_hooks`."""

pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Undo `push_hooks`."""

top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
"""The pair of saved-tensor hooks that a tensor saved now would go through, or None; takes False. No
public form."""

nodes_so_far: Callable[[], int] = _autograd._get_sequence_nr
"""How many ops autograd has followed on this thread. No public form."""

keep_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
"""Whether the backward that is running was called with `retain_graph=True`. No public form."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that is running on this thread, or -1. No public form."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward runs on this thread, or None. No public form."""

exec_group: Callable[[], Any] = torch._C._get_graph_exec_group
"""The exec group that is entered, also on autograd's own threads. No public form."""

set_exec_group: Callable[[Any], None] = torch._C._set_graph_exec_group
"""Enter an exec group, or leave it with None. No public form."""

any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device type; public forms ask for one device type at a time."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Turn gradients on or off on this thread. Public form: `torch.enable_grad`, a context manager."""

grad_enabled: Callable[[], bool] = torch.is_grad_enabled
"""Whether gradients are on. Public."""


def without_grad(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function with gradients off. Public form: `torch.no_grad()`, which Ctrl-C may undo."""
    was = grad_enabled()
    try:
        set_grad_enabled(False)
        return function(*args)
    finally:
        set_grad_enabled(was)  # the first call of all: nothing can strike before it


cuda_in_use: Callable[[], bool] = torch.cuda.is_initialized
"""Whether this process has begun to use CUDA. Public."""

current_cuda_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
"""The current CUDA device, once CUDA is in use. Public form: `torch.cuda.current_device`."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many torch-function modes are entered (a `torch.device` context is one)."""

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are entered. No public form."""

entered_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
"""The dispatch modes that are entered. No public form."""

torch_function_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether `__torch_function__` of tensor subclasses is looked at. No public form."""

func_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""The innermost `torch.func` transform (grad, vmap, …) that runs here, or None. No public form."""

runs_whole_graph: Callable[[], bool] = torch.autograd.Variable._execution_engine.is_checkpoint_valid
"""Whether the backward that runs was called without chosen inputs. No public form."""

ASKS_DEVICE = torch.ops.prim.device.default
"""What a dispatch mode sees when somebody asks a fake tensor for its device: no op of anybody's."""


@cache
def reads_metadata(op: Any) -> bool:
    """Whether an op tells a tensor's sizes, strides, device or the like, and makes no tensor.

    Note [Questions that are no ops]. Whoever asks a tensor subclass for its sizes calls such an op,
    and dispatch modes see it. Autograd asks while it holds the tensor's lock: a mode that then
    reads the tensor's `grad_fn` or `is_leaf` waits for ever. So these are run, and nothing else.
    """
    schema = getattr(op, "_schema", None)
    if schema is None or op.namespace not in ("aten", "prim") or schema.is_mutable:
        return False
    told = [str(returned.type) for returned in schema.returns]
    if not told or any("Tensor" in kind for kind in told):
        return False
    return torch.Tag.data_dependent_output not in op.tags


def capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream: nothing may wait for the device."""
    return cuda_in_use() and torch.cuda.is_current_stream_capturing()


def version_of(tensor: torch.Tensor) -> int:
    """A tensor's version counter, or -1: inference tensors have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """A tensor's shape; of a nested one that is not jagged, and has none, how much it holds."""
    try:
        return tensor.shape
    except RuntimeError:
        return torch.Size((tensor.numel(),))


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set a tensor's version counter. No public form: `increment_version` adds one."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


WeakTensor: Callable[[torch.Tensor], Any] = torch._C._WeakTensorRef  # type: ignore[attr-defined]
"""A weak reference to a tensor itself, not to its Python object: while it is held, no other tensor
gets the same `tensor_key`. No public form."""


def tensor_key(tensor: torch.Tensor) -> int:
    """A number that no other living tensor has, whatever Python objects stand for it."""
    key: int = tensor._cdata
    return key


def past_modes(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function of our own past any dispatch mode: nobody is to count or record its ops."""
    if not dispatch_modes():
        return function(*args)
    modes = entered_modes()
    try:
        _pop_modes(len(modes))
        out = function(*args)
        _set_dispatch_modes(modes)
    except BaseException:
        _set_dispatch_modes(modes)
        raise
    return out


_NOTHING = nullcontext()
_push_mode = torch._C._push_on_torch_dispatch_stack


def _pop_modes(count: int) -> None:
    tuple(map(torch._C._pop_torch_dispatch_stack, repeat(None, count)))


def _set_dispatch_modes(modes: Sequence[Any]) -> None:
    if [*map(id, entered_modes())] != [*map(id, modes)]:
        _pop_modes(dispatch_modes())
        tuple(map(_push_mode, modes))


_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_mode_flags = operator.attrgetter(*_MODE_FLAGS)


def dispatch_state() -> tuple[Sequence[Any], tuple[bool, ...]]:
    """The dispatch modes that are entered, and what torch notes of them. No public form."""
    return entered_modes() if dispatch_modes() else (), _mode_flags(_python_dispatch)


def set_dispatch_state(state: tuple[Sequence[Any], tuple[bool, ...]]) -> None:
    """Have the same dispatch modes entered as when `dispatch_state` was called. No public form."""
    modes, flags = state
    _set_dispatch_modes(modes)
    for name, flag in zip(_MODE_FLAGS, flags, strict=True):
        setattr(_python_dispatch, name, flag)
    tell = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    if tell is not None:  # not every version of torch keeps it twice
        tell(flags[-1])


def set_function_modes(modes: Sequence[Any]) -> None:
    """Have these torch-function modes entered, and no others. No public form."""
    if [*map(id, entered_function_modes())] != [*map(id, modes)]:
        _call_each(repeat(torch._C._pop_torch_function_stack, function_modes()))
        tuple(map(torch._C._push_on_torch_function_stack, modes))


entered_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
"""The torch-function modes that are entered. No public form."""


def _call_each(functions: Any) -> tuple[Any, ...]:
    """Call functions of C without arguments. Note [In one call]."""
    return tuple(map(operator.call, functions))


below_modes: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch
"""Runs ops of our own on plain tensors past any dispatch mode, and takes next to no time. Tensor
subclasses are not looked at either: where there may be some, use `past_modes`. No public form."""


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Leaves inference mode for a while. Public form: `torch.inference_mode(False)`."""
    if not torch.is_inference_mode_enabled():
        return _NOTHING
    guard: AbstractContextManager[Any] = torch._C._InferenceMode(False)  # at once, not when entered
    return guard


def pop_hooks_to(top: Any) -> None:
    """Pop saved-tensor hooks until those are on top that `top_hooks` gave before, or a stand-in."""
    while True:
        now = top_hooks(False)
        if now is None or _are_same_hooks(now, top):
            return
        pop_hooks()


def _are_same_hooks(now: Any, top: Any) -> bool:
    if isinstance(now[0], StandInHook):
        now = now[0].stands_for
    return None not in (now, top) and now[0] is top[0] and now[1] is top[1]


class StandInHook:
    """A hook that hands on what it is given, in the place of the hooks that are on top now.

    Those are not found on the stack any more, and whoever pops to them stops here.
    """

    def __init__(self) -> None:
        self.stands_for = top_hooks(False)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


def torch_function_disabled() -> AbstractContextManager[Any]:
    """`__torch_function__` off, that of modes too. No public form."""
    return torch._C.DisableTorchFunction()


_C: Any = torch._C
torch_function_state: Callable[[], Any] = _C._get_torch_function_state
"""Whether `__torch_function__` is on, off for subclasses, or off for modes too. No public form."""

set_torch_function_state: Callable[[Any], None] = _C._set_torch_function_state
"""Set it; `backward` of a subclass turns it off. No public form."""

TORCH_FUNCTION_ON = _C._TorchFunctionState.ENABLED


class LeftTransforms:
    """Leaves all `torch.func` transforms, and enters them again. No public form."""

    def __init__(self) -> None:
        self._depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        self._left: list[Any] = []

    def leave(self) -> None:
        pop = torch._C._functorch.pop_dynamic_layer_stack
        self._left.extend(map(operator.call, repeat(pop, self._depth)))

    def enter_again(self) -> None:
        if torch._C._functorch.get_dynamic_layer_stack_depth() < self._depth:
            tuple(map(torch._C._functorch.push_dynamic_layer_stack, reversed(self._left)))


def old_vmap_level() -> int:
    """How deep in the vmap that `grad(is_grads_batched=True)` uses. No public form."""
    level: int = _call_each(_UP_AND_DOWN)[1]
    return level


_up, _down = torch._C._vmapmode_increment_nesting, torch._C._vmapmode_decrement_nesting
_UP_AND_DOWN = _up, _down


def set_old_vmap_level(level: int) -> None:
    """Leave that vmap, with 0, or be as deep in it as before. No public form."""
    now = old_vmap_level()
    _call_each(repeat(_up if now < level else _down, abs(level - now)))


_AUTOCAST_UP_AND_DOWN = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def autocast_level() -> int:
    """How many autocast contexts are entered; casts are cached while any is. No public form."""
    level: int = _call_each(_AUTOCAST_UP_AND_DOWN)[1]
    return level


def set_autocast_level(level: int) -> None:
    """Count so many autocast contexts as entered; with none, casts are no longer cached."""
    now = autocast_level()
    _call_each(repeat(_AUTOCAST_UP_AND_DOWN[now > level], abs(level - now)))
    if level == 0:
        torch.clear_autocast_cache()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running on this thread ends. No public form."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


def with_versions(function: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Call a function so that views it makes share their version counter. No public form.

    Inside a dispatch mode they would not: it runs below the part of autograd that sees to it.
    """
    was = _is_excluded(_VERSIONS)
    try:
        _set_excluded(_VERSIONS, False)
        return function(tensor)
    finally:
        _set_excluded(_VERSIONS, was)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` with the same version counter, wherever it is called. No public form.

    Also inside a dispatch mode; and of one of several views whose base was changed in place, at
    which autograd would raise.
    """
    try:
        alias: torch.Tensor = with_versions(_detach, tensor)
    except RuntimeError:
        with below_autograd():
            alias = with_versions(_detach, tensor)
    return alias


_detach = torch.Tensor.detach

FAKE = torch._C._TorchDispatchModeKey.FAKE
PROXY = torch._C._TorchDispatchModeKey.PROXY
entered_mode: Callable[[Any], Any] = torch._C._get_dispatch_mode
"""Called with `FAKE` or `PROXY`: the mode of that kind that is entered, or None. The latter makes a
graph of what runs. No public form."""


def is_traced() -> bool:
    """Whether a graph is being made of what runs: by `torch.compile`, or `make_fx`."""
    return entered_mode(PROXY) is not None


def below_autograd() -> AbstractContextManager[Any]:
    """Where ops run as below autograd, whatever the grad mode is. No public form."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor, or None, also for a view of which autograd refuses to tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


class _Nothing(dict[torch.device, torch.Tensor]):
    """A tensor without data on each device."""

    def __missing__(self, device: torch.device) -> torch.Tensor:
        self[device] = torch.empty(0, dtype=torch.uint8, device=device)
        return self[device]


_nothing_on = _Nothing()


def versions_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data that shares the version counter of `tensor`. No public form."""
    counter = tensor.detach()
    counter.data = _nothing_on[tensor.device]
    return counter


def storage_again(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage behind a weak reference, if somebody still holds it. No public form."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects hold a storage. No public form."""
    return torch._C._storage_Use_Count(storage._cdata)


def device_segments(device: torch.device) -> int:
    """How often memory of a device had to be asked from its driver so far."""
    return int(torch.cuda.memory_stats(device).get("segment.all.allocated", 0))


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a living storage from all others. No public form."""
    key: int = storage._cdata
    return key


def saved_by(node: Any, name: str) -> Any:
    """What saved-tensor hooks packed for a node's saved tensor `name`; None if it saved none.

    The public form, `node._saved_<name>`, unpacks it.
    """
    try:
        return getattr(node, f"_raw_saved_{name}").data
    except RuntimeError:  # a backward has freed it
        return None


def default_store() -> Any:
    """The key-value store by which the default process group was set up. No public form."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    return _get_default_store()


def part_of_store(name: str, store: Any) -> Any:
    """The part of a key-value store whose keys begin with a name."""
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415

    return PrefixStore(name, store)
