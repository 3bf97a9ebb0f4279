"""What a region did: values, and the calls that made them.

A value knows the call that made it, a call the values it was given: so whoever holds a value can
have it made again, and holds nothing else. No table keeps them: when autograd frees what it saved,
all that only led there goes with it, kept tensors included. What nobody needs in backward is never
held, whatever a policy says.

Note [What is not made again]. Some values are held by reference, as autograd itself would: the
region's inputs and whatever else it finds outside; what was changed in place, from then on; memory
that an op left unwritten (`empty`), because something that no dispatcher sees may write to it; and
the results of ops that change a buffer, which must not change it twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from rekindle.errors import CheckpointError
from rekindle.offload.activation import Kept, Saved
from rekindle.regions.recompute import rng_state as random_state
from rekindle.regions.recompute import slots
from rekindle.regions.recompute.collect import Collected
from rekindle.regions.recompute.torch_state import Surroundings
from rekindle.regions.selective import kernel_backends
from rekindle.torch_private.autocast import any_autocast
from rekindle.torch_private.func_transforms import func_transform, old_vmap_level
from rekindle.torch_private.grad_mode import (
    below_autograd,
    grad_enabled,
    outside_inference_mode,
    set_grad_enabled,
    without_grad,
)
from rekindle.torch_private.version_counters import detached, version_of, with_versions

if TYPE_CHECKING:
    from weakref import ref

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of saved-tensor hooks: what takes a tensor, and what gives it back."""


class RecordedSlot(ABC):
    """A saved tensor in the keeping of a region that is recorded."""

    __slots__ = ()

    @abstractmethod
    def note_just_saved(self) -> None:
        """A region inside that one saves it again."""


class Held:
    """A tensor that is held from forward to backward, unless somebody else's hooks hold it."""

    __slots__ = ("_packed", "_unpack", "is_elsewhere", "maker", "nbytes", "version")

    def __init__(self, tensor: Tensor, maker: Any, hooks: Hooks | None) -> None:
        self.maker = maker
        """The op that made it, or the name it was given; None if it comes from outside."""
        self.version = version_of(tensor)
        self.nbytes = nbytes_of(tensor) if maker is not None else 0
        """Its size, if the region made it; what comes from outside is there anyway."""
        self.is_elsewhere = hooks is not None
        """Whether somebody's hooks hold it, so that it takes something to get it."""
        if hooks is None:
            # What an op made gets its `grad_fn` later, and would lead back to who holds it.
            is_parameter = isinstance(tensor, nn.Parameter)
            self._packed: Any = tensor if is_parameter else detached(tensor)
            self._unpack: Callable[[Any], Tensor] | None = None
        else:
            self._packed = without_grad(with_versions, hooks[0], tensor)
            self._unpack = hooks[1]
            if isinstance(self._packed, Tensor):
                self.version = version_of(self._packed)

    @property
    def can_be_shown(self) -> bool:
        """Whether views of it may be held as well; a parameter's memory may be exchanged."""
        return not self.is_elsewhere and not isinstance(self._packed, nn.Parameter)

    def here(self) -> Tensor | None:
        """The tensor, unless somebody's hooks hold it."""
        if isinstance(self._packed, Kept):  # the offload engine does, where it is
            return self._packed.tensor
        return None if self.is_elsewhere else self._packed

    def copied(self, tensor: Tensor | None, hooks: Hooks | None) -> "Held | None":
        """A copy of it to hold from now on, since it is about to be changed; None if none is due.

        A region around that holds it sees to that itself. One that is replayed whole counts what
        it is given: it holds nothing in forward, and in its replay the copy takes the place of what
        it was given. What other hooks hold may be a copy already, or may be the very `tensor` that
        they were given: a copy stays here, for they may count as well.
        """
        if isinstance(self._packed, RecordedSlot) or self._unpack is slots.unpack:
            return None
        replay = getattr(self._unpack, "__self__", None)
        if isinstance(replay, Collected):
            if tensor is not None:
                replay.copy_before_change(tensor, copy_of)
            return None
        if isinstance(self._packed, Saved):
            tensor = self._packed.at_hand() if self._packed.is_unchanged() else None
        else:
            here = self.here()
            tensor, hooks = (tensor, None) if here is None else (here, hooks)
        return None if tensor is None else Held(copy_of(tensor), self.maker, hooks)

    @property
    def slot(self) -> "RecordedSlot | None":
        """The slot of the region around that holds it, if one does."""
        return self._packed if isinstance(self._packed, RecordedSlot) else None

    def get(self) -> Tensor:
        if self._unpack is not None:
            if isinstance(self._packed, Tensor):  # perhaps the very tensor that hooks were given
                self._check(self._packed)
            return self._unpack(self._packed)
        tensor: Tensor = self._packed
        if isinstance(tensor, nn.Parameter) and _is_let_go(tensor):
            raise CheckpointError(
                f"A parameter, {tensor.dtype} {list(tensor.shape)}, has no memory any more: it was "
                "sharded again after the region used it, and what the region has to make again "
                "depends on it. Shard the region as one unit, so that it is gathered for its "
                "backward, or keep the op that uses the parameter."
            )
        self._check(tensor)
        return tensor

    def _check(self, tensor: Tensor) -> None:
        """Raise if what is held was changed in place."""
        if version_of(tensor) != self.version:
            raise CheckpointError(
                f"{_told(self.maker)}, {tensor.dtype} {list(tensor.shape)}, was changed in place "
                f"after the region used it: it is at version {version_of(tensor)}; expected "
                f"version {self.version}. "
                "What the region has to make again depends on it. Change a clone of it instead."
            )


def _is_let_go(parameter: Tensor) -> bool:
    """Whether a parameter's memory was given back, as FSDP does."""
    try:
        return parameter.numel() > 0 and parameter.untyped_storage().nbytes() == 0
    except (NotImplementedError, RuntimeError):
        return False


def _told(maker: Any) -> str:
    if maker is None:
        return "A tensor from outside the region, or one that the region changed in place"
    return f"What was named {maker!r}" if isinstance(maker, str) else f"What {maker} made"


class Value:
    """One tensor of a recorded region: held, or to be made by the call that made it."""

    __slots__ = ("__weakref__", "held", "is_fixed", "maker", "needs_replay", "now")

    def __init__(self, maker: "Call | None", held: "Held | None" = None) -> None:
        self.maker = maker
        self.held = held
        self.is_fixed = False
        """Whether parameters alone decide it, as their casts."""
        self.needs_replay = False
        """Whether it comes back by a replay alone: Note [Compiled code in a recorded region]."""
        self.now: Tensor | None = None
        """The tensor while backward has use for it, if it was made again."""

    def hold(self, held: "Held") -> None:
        """From now on it is held; what it was made from is no longer needed for it."""
        self.held = held
        self.maker = None
        self.needs_replay = False

    def tensor(self, made: "list[Value]") -> Tensor | None:
        """The tensor, if it is held or was made again; what had to be brought back is noted."""
        if self.now is None and self.held is not None:
            tensor = self.held.get()
            if not self.held.is_elsewhere:
                return tensor
            made.append(self)
            self.now = tensor
        return self.now


_default_dtype = torch.get_default_dtype


class Call:
    """One op of a recorded region, to be run again on the same values."""

    __slots__ = (
        "args",
        "dtype",
        "func",
        "grad",
        "inputs",
        "kwargs",
        "needs_grad",
        "outs",
        "rng",
        "switches",
    )

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Value]
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.dtype = _default_dtype()
        self.grad = grad_enabled()
        self.rng: random_state.RngState | None = None
        self.switches: kernel_backends.Switches | None = None
        self.needs_grad = False
        """Whether it may do something else where gradients are off, as they are in backward."""
        self.outs: list[ref[Value]] = []

    def run(self, made: list[Value], for_good: bool, is_usual: bool) -> None:
        """Run the op again, and note the values that still live and now have their tensors.

        For good: no backward will want them made once more, so they let go of what they were made
        from, and that goes as soon as nothing else needs it.
        """
        given = self._given(made)  # for which a region around this one may be replayed
        out = self._out(*given) if is_usual else _as_recorded(self._out, *given)
        tensors = (out,) if isinstance(out, Tensor) else tensors_of(out)
        for weak, tensor in zip(self.outs, tensors, strict=True):
            value = weak()
            if value is not None and value.held is None:
                if not for_good:
                    made.append(value)
                value.now = tensor
                if for_good:
                    value.maker = None

    def _given(self, made: list[Value]) -> tuple[list[Any], dict[str, Any]]:
        """What the op is to be run on; what had to be brought back is noted."""
        args = [_given(arg, made) for arg in self.args]
        if not self.kwargs:
            return args, self.kwargs
        return args, {key: _given(arg, made) for key, arg in self.kwargs.items()}

    def _out(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What the op makes, run as it was."""
        rng = None if self.rng is None else random_state.now(self.rng)
        switches = None if self.switches is None else kernel_backends.take()
        dtype, grad = _default_dtype(), grad_enabled()
        if (
            dtype is self.dtype
            and rng is None
            and not self.needs_grad
            and switches == self.switches
        ):
            return self.func(*args, **kwargs)

        def put_back() -> None:
            if self.needs_grad:
                set_grad_enabled(grad)
            if dtype is not self.dtype:
                torch.set_default_dtype(dtype)
            if switches is not None:
                kernel_backends.put(switches)
            if rng is not None:
                random_state.restore(rng)

        try:
            if self.rng is not None:
                random_state.restore(self.rng)
            if self.switches is not None:
                kernel_backends.put(self.switches)
            if dtype is not self.dtype:
                torch.set_default_dtype(self.dtype)
            if self.needs_grad:
                set_grad_enabled(self.grad)
            out = self.func(*args, **kwargs)
            put_back()
        except BaseException:  # Note [Put back as often as asked]
            put_back()
            raise
        return out


def _given(arg: Any, made: list[Value]) -> Any:
    """An argument with tensors in place of values."""
    kind = type(arg)
    if kind is Value:
        tensor = arg.tensor(made) if arg.now is None else arg.now
        assert tensor is not None, "calls are run in order"
        return tensor
    if kind is list or kind is tuple:
        return kind([_given(item, made) for item in arg])
    return arg


def note_just_saved(value: Value) -> None:
    """Autograd saves a value that is known: tell the region around that holds it, if one does.

    Note [What an op saves before it runs].
    """
    if value.held is not None and value.held.slot is not None:
        value.held.slot.note_just_saved()


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors that an op returned, in order."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, tuple | list):
        return [tensor for item in out for tensor in tensors_of(item)]
    return []


def is_of_a_parameter(call: Call) -> bool:
    """Whether a view shows a parameter."""
    while call.inputs:
        value = call.inputs[0]
        if value.maker is None:
            return value.held is not None and isinstance(value.held.here(), nn.Parameter)
        call = value.maker
    return False


def nbytes_of(tensor: Tensor) -> int:
    """The size of a tensor's content; of a view, what it shows."""
    return tensor.numel() * tensor.element_size()


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which decide the order of sums."""
    tensor = tensor.detach()
    copy = tensor.clone()
    if tensor.layout is not torch.strided or copy.stride() == tensor.stride():
        return copy
    if 0 in tensor.stride():  # some of its elements are one in memory
        whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        return whole.clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def source_bytes(value: Value) -> int:
    """The size of what was kept and a value is made from."""
    found: dict[Value, int] = {}
    seen: set[Value] = set()
    stack = [value]
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.held is not None:
            found[source] = source.held.nbytes
        elif source.maker is not None:
            stack += source.maker.inputs
    return sum(found.values())


def make(wanted: Value, made: list[Value], for_good: bool) -> int:
    """Have a value made, by the calls it depends on and no others; the number of them."""
    calls = _needed(wanted)
    count = len(calls)
    is_usual = _is_usual(calls)
    while calls:  # one by one: what only led to something that was made goes at once
        calls.pop().run(made, for_good, is_usual)
    return count


def _is_usual(calls: list[Call]) -> bool:
    """Whether there is nothing to leave, as in most backwards: there gradients are off."""
    return not (
        grad_enabled()
        or any(call.needs_grad for call in calls)
        or any_autocast()
        or func_transform() is not None
        or torch.is_inference_mode_enabled()
        or old_vmap_level()
    )


def _needed(wanted: Value) -> list[Call]:
    """The calls to run, the last first: each after those it depends on."""
    maker = wanted.maker
    if maker is None:
        return []
    order: dict[Call, None] = {}
    stack: list[Call] = [maker]
    while stack:
        call = stack[-1]
        if call in order:
            stack.pop()
            continue
        missing = [
            value.maker
            for value in call.inputs
            if value.now is None and value.maker is not None and value.maker not in order
        ]
        if missing:
            stack += missing
        else:
            order[stack.pop()] = None
    return list(order)[::-1]


def _as_recorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where ops run as they were recorded: after autocast, autograd, transforms."""
    before = Surroundings()
    try:
        with below_autograd(), outside_inference_mode():
            if any_autocast():  # what was to be cast was cast then
                for kind in ("cpu", "cuda"):
                    torch.set_autocast_enabled(kind, False)
            before.leave_transforms()
            out = function(*args)
            before.put_back()
    except BaseException:  # Note [Put back as often as asked]
        before.put_back()
        raise
    return out
