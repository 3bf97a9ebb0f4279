"""The graph that a region records: values, and the ops that made them.

A value knows the op that made it, an op the values it was given: so whoever holds a value can have
it made again, and holds nothing else. No table keeps them: when autograd frees what it saved, all
that only led there goes with it, kept tensors included. What nobody needs in backward is never
held, whatever a policy says.

Note [What is not made again]. Some values are held by reference, as autograd itself would: the
region's inputs and whatever else it finds outside; what was changed in place, from then on; memory
that an op left unwritten (`empty`), because something that no dispatcher sees may write to it; and
the results of ops that change a buffer, which must not change it twice.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rekindle.regions.recompute import rng_state as random_state
from rekindle.regions.recompute.torch_state import TorchState
from rekindle.regions.selective import kernel_backends
from rekindle.regions.selective.op_addresses import is_parameter
from rekindle.regions.selective.op_kinds import OpTraits
from rekindle.torch_private.autocast import any_autocast
from rekindle.torch_private.func_transforms import func_transform, old_vmap_level
from rekindle.torch_private.grad_mode import (
    below_autograd,
    grad_enabled,
    outside_inference_mode,
    set_grad_enabled,
)

if TYPE_CHECKING:
    from weakref import ref

    from rekindle.regions.selective.held_tensor import HeldTensor

_default_dtype = torch.get_default_dtype


class RecordedValue:
    """The content of one tensor of a region: held, or made again by the op that made it.

    A tensor that is changed in place has another value from then on.
    """

    __slots__ = ("__weakref__", "from_parameters", "held", "needs_replay", "op", "remade")

    def __init__(self, op: "RecordedOp | None") -> None:
        self.op = op
        """The op that makes it again; None if it is held, or is to be."""
        self.held: HeldTensor | None = None
        self.from_parameters = False
        """True if parameters alone decide it, as they do their casts."""
        self.needs_replay = False
        """True if only a replay makes it again: Note [Compiled code in a recorded region]."""
        self.remade: Tensor | None = None
        """The tensor while backward has use for it, if it was made again or fetched."""

    def hold(self, held: "HeldTensor") -> None:
        """Hold a tensor for the value from now on; what it was made from is no longer needed."""
        self.held = held
        self.op = None
        self.needs_replay = False

    def tensor(self, remade: "list[RecordedValue]") -> Tensor | None:
        """The tensor, if it is held or was made again; what was fetched is added to `remade`."""
        if self.remade is None and self.held is not None:
            tensor = self.held.get()
            if not self.held.is_elsewhere:
                return tensor
            remade.append(self)
            self.remade = tensor
        return self.remade

    def note_just_saved(self) -> None:
        """Tell the region around that holds the value, if one does, that autograd saves it again.

        Note [What an op saves before it runs].
        """
        slot = None if self.held is None else self.held.slot
        if slot is not None:
            slot.note_just_saved()


class Settings(NamedTuple):
    """Settings of forward that decide what an op does; None for those that do not."""

    rng: random_state.RngState | None = None
    """Random state from before the op, if it draws numbers."""
    backends: kernel_backends.Switches | None = None
    """Switches of kernel backends, if they decide which kernel computes the op."""
    grad_mode: bool | None = None
    """Grad mode, if the op may do something else where gradients are off."""


_NO_SETTINGS = Settings()


class RecordedOp:
    """One op of a recorded region, to be run again on the same values."""

    __slots__ = (
        *("_default_dtype", "args", "inputs", "is_flat", "kwargs", "outputs", "settings"),
        "traits",
    )

    def __init__(
        self,
        traits: OpTraits,
        inputs: Sequence[RecordedValue],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_flat: bool,
    ) -> None:
        self.traits = traits
        self.inputs = inputs
        """The values of its tensors."""
        self.is_flat = is_flat
        """True if its arguments are its tensors, and then `args` and `kwargs`, which have none."""
        self.args = args
        """Arguments, with values in place of tensors; of a flat op, those after the tensors."""
        self.kwargs = kwargs
        self.outputs: list[ref[RecordedValue]] = []
        self.settings = _NO_SETTINGS
        self._default_dtype = _default_dtype()

    def rerun(self, remade: list[RecordedValue], for_good: bool, is_plain: bool) -> None:
        """Run the op again, and give the values that still live their tensors.

        With `for_good`, no backward will want them made once more: they let go of what they were
        made from, and that goes as soon as nothing else needs it. Otherwise they are added to
        `remade`. With `is_plain`, there are no autocast, autograd or transforms to leave.
        """
        traits, kwargs = self.traits, self.kwargs
        args: list[Any]
        if self.is_flat:  # to fetch a tensor, a region around this one may be replayed
            args = [_tensor_of(v, remade) if v.remade is None else v.remade for v in self.inputs]
            args += self.args
        else:
            args = [_tensor_for(arg, remade) for arg in self.args]
            kwargs = {key: _tensor_for(arg, remade) for key, arg in kwargs.items()}
        if not is_plain or self.settings.grad_mode is not None:
            out = _as_recorded(self._run, args, kwargs)
        elif self.settings is _NO_SETTINGS and self._default_dtype is _default_dtype():
            out = traits.call(*args, **kwargs)
        else:
            out = self._run(args, kwargs)
        tensors = (out,) if type(out) is Tensor else tensors_of(out)
        for weak, tensor in zip(self.outputs, tensors, strict=True):
            value = weak()
            if value is not None and value.held is None:
                value.remade = tensor
                if for_good:
                    value.op = None
                else:
                    remade.append(value)

    def _run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the op under the settings that it ran under in forward."""
        then = self.settings
        rng = None if then.rng is None else random_state.now(then.rng)
        backends = None if then.backends is None else kernel_backends.snapshot()
        dtype, grad_mode = _default_dtype(), grad_enabled()
        if (
            dtype is self._default_dtype
            and rng is None
            and then.grad_mode is None
            and backends == then.backends
        ):
            return self.traits.call(*args, **kwargs)

        def put_back() -> None:
            if then.grad_mode is not None:
                set_grad_enabled(grad_mode)
            if dtype is not self._default_dtype:
                torch.set_default_dtype(dtype)
            if backends is not None:
                kernel_backends.restore(backends)
            if rng is not None:
                random_state.restore(rng)

        try:
            if then.rng is not None:
                random_state.restore(then.rng)
            if then.backends is not None:
                kernel_backends.restore(then.backends)
            if dtype is not self._default_dtype:
                torch.set_default_dtype(self._default_dtype)
            if then.grad_mode is not None:
                set_grad_enabled(then.grad_mode)
            out = self.traits.call(*args, **kwargs)
            put_back()
        except BaseException:  # Note [Put back as often as asked]
            put_back()
            raise
        return out


def _tensor_of(value: RecordedValue, remade: list[RecordedValue]) -> Tensor:
    """The tensor of a value that an op is given."""
    tensor = value.tensor(remade)
    assert tensor is not None, "ops are run in order"
    return tensor


def _tensor_for(arg: Any, remade: list[RecordedValue]) -> Any:
    """An argument with tensors in place of values."""
    kind = type(arg)
    if kind is RecordedValue:
        return _tensor_of(arg, remade)
    if kind is list or kind is tuple:
        return kind([_tensor_for(item, remade) for item in arg])
    return arg


def remake(wanted: RecordedValue, remade: list[RecordedValue], for_good: bool) -> int:
    """Make a value again by the ops that it depends on and no others; the number of those ops."""
    ops = _needed_ops(wanted)
    count = len(ops)
    is_plain = _is_plain()
    while ops:  # one by one: what only led to something that was made goes at once
        ops.pop().rerun(remade, for_good, is_plain)
    return count


def _needed_ops(wanted: RecordedValue) -> list[RecordedOp]:
    """The ops to run, the last first: each after those it depends on."""
    if wanted.op is None:
        return []
    order: dict[RecordedOp, None] = {}
    stack: list[RecordedOp] = [wanted.op]
    while stack:
        op = stack[-1]
        depth = len(stack)
        for value in op.inputs:
            maker = value.op
            if maker is not None and value.remade is None and maker not in order:
                stack.append(maker)
        if len(stack) == depth:
            order[stack.pop()] = None
    return list(order)[::-1]


def _is_plain() -> bool:
    """True if there are no settings to leave, as in most backwards: there gradients are off."""
    return not (
        grad_enabled()
        or any_autocast()
        or func_transform() is not None
        or torch.is_inference_mode_enabled()
        or old_vmap_level()
    )


def _as_recorded(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function where ops run as they were recorded: after autocast, autograd, transforms."""
    before = TorchState()
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


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors that an op returned, in order."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, tuple | list):
        return [tensor for item in out for tensor in tensors_of(item)]
    return []


def shows_a_parameter(op: RecordedOp) -> bool:
    """True if a view is one of a parameter."""
    while op.inputs:
        value = op.inputs[0]
        if value.op is None:
            here = None if value.held is None else value.held.on_device()
            return here is not None and is_parameter(here)
        op = value.op
    return False


def source_bytes(value: RecordedValue) -> int:
    """Bytes of the kept tensors that a value is made from."""
    found: dict[RecordedValue, int] = {}
    seen: set[RecordedValue] = set()
    stack = [value]
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.held is not None:
            found[source] = source.held.nbytes
        elif source.op is not None:
            stack += source.op.inputs
    return sum(found.values())
