"""Runs a model on fake tensors: nothing is allocated, nothing computed.

Parameters, buffers and the batch are replaced by fake tensors for a while. Ops on these give the
shapes and lifetimes of real ones. Their device is the CPU, because autograd wants a real device
behind any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.errors import RekindleError
from rekindle.planner.trace.emulate_cuda_ops import EmulateCudaOps
from rekindle.rows.row_tensor import runs_by_rows
from rekindle.torch_private.dispatch_modes import ASKS_DEVICE, TorchDispatchMode, past_modes
from rekindle.torch_private.fake_mode import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from rekindle.torch_private.module_calls import rnn_weights
from rekindle.torch_private.pytrees import tree_leaves, tree_map
from rekindle.torch_private.storages import storage_key

CPU = torch.device("cpu")


class FakeTensors:
    """Fake tensors for real ones, one for each, which share storages as the real ones do."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[int, Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._alive: list[Tensor] = []
        """Tensors that have a fake, held so that no id is used twice."""
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor; a parameter for a parameter."""
        fake = self._known.get(id(tensor))
        if fake is None:
            self._alive.append(tensor)
            with self._mode, torch.no_grad():
                fake = self._like(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            else:
                fake.requires_grad_(tensor.requires_grad)
            self._known[id(tensor)] = fake
        return fake

    def of_foreign(self, leaf: Any) -> Any:
        """Return the fake of a tensor from outside the model; fakes and small integers stay."""
        if not isinstance(leaf, Tensor) or (_is_readable(leaf) and not leaf.is_floating_point()):
            return leaf
        if isinstance(leaf, FakeTensor):
            return leaf if leaf.fake_mode is self._mode else self.of(leaf)
        if type(leaf) not in _PLAIN:
            return leaf
        if leaf.is_leaf and leaf.requires_grad:
            self._gradients.setdefault(id(leaf), (leaf, leaf.grad))
        return self.of(leaf)

    def restore_gradients(self) -> None:
        """Restore the gradients of tensors from outside the model."""
        for tensor, gradient in self._gradients.values():
            tensor.grad = gradient

    def _like(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage_key(storage), tensor.dtype
        if key not in self._storages:
            count = storage.nbytes() // tensor.element_size()
            self._storages[key] = torch.empty(count, dtype=tensor.dtype, device=CPU)
        whole = self._storages[key]
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


def refuse_what_has_no_fake(model: nn.Module) -> None:
    """Raise a `ValueError` if a fake of some tensor of the model cannot be made."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (*_PLAIN, FakeTensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}: without memory, plain tensors can be "
                "profiled. Profile the model before it is sharded or quantized."
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} is not strided: it cannot be profiled without memory")


class _FakeUnlessReadable(TorchDispatchMode):
    """Gives ops fake tensors, wherever theirs come from, but for what models read.

    Models read positions and masks, to leave out what is not needed, and draw a number to drop a
    layer. So small tensors of integers, and scalars, are real if they are computed from nothing
    fake: the model reads the values that it would.
    """

    def __init__(self, fakes: FakeTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if runs_by_rows(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(map(_is_readable, given)):
            return self._run_readable(func, args, kwargs)
        if not all(isinstance(tensor, FakeTensor) for tensor in given):
            args, kwargs = tree_map(self._fakes.of_foreign, (args, kwargs))
        return func(*args, **kwargs)

    def _run_readable(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass
        else:
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if not made or not all(tensor.device == CPU and _is_small(tensor) for tensor in made):
                return out
        return past_modes(partial(func, *args, **kwargs))


def _is_readable(tensor: Tensor) -> bool:
    is_constant = type(tensor) is Tensor and not tensor.requires_grad
    return is_constant and tensor.device == CPU and _is_small(tensor)


def _is_small(tensor: Tensor) -> bool:
    """Return whether the elements are integers or booleans, and few; or there is only one."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= _MOST_INTEGERS if is_integer else tensor.dim() == 0


_MOST_INTEGERS = 1 << 22
"""More than a long sequence has tokens: of 256 k positions transformers makes a few more, to see
whether it needs a mask."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@contextmanager
def with_fake_tensors(model: nn.Module, batch: Any, *, as_on: str = "cpu") -> Iterator[Any]:
    """Replace the model's tensors by fake ones, as on a device; yields the batch likewise."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = FakeTensors(mode)
    own = list(tensor_slots(model))
    try:
        for tensors, name, tensor in own:
            tensors[name] = fakes.of(tensor)
        given = tree_map(fakes.of_foreign, batch)
        on_device = nullcontext() if as_on == "cpu" else EmulateCudaOps()
        with on_device, mode, _FakeUnlessReadable(fakes):
            yield given
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RekindleError(
            f"The step looks at the values of a tensor ({error.func}), and without memory there "
            "are none. Give it what it would find out, such as a mask, or profile it on a device."
        ) from error
    finally:
        for tensors, name, tensor in own:
            tensors[name] = tensor
        fakes.restore_gradients()


def tensor_slots(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield the places of a model's tensors: the container, the key in it, and the tensor.

    Of lists and dicts that are attributes, parameters alone: other tensors there come and go.
    """
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    yield tensors, name, tensor
        for box in [box for box in vars(module).values() if type(box) in (list, dict)]:
            for key, tensor in box.items() if isinstance(box, dict) else enumerate(box):
                if isinstance(tensor, nn.Parameter) and box is not module._parameters:
                    yield box, key, tensor
        if isinstance(module, nn.RNNBase):
            for index, tensor in enumerate(rnn_weights(module)):
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    yield rnn_weights(module), index, tensor


def is_without_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is fake or on the meta device."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
