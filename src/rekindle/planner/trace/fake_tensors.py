"""A model on tensors without memory: nothing is allocated, nothing computed.

Parameters, buffers and the batch have fake tensors in their place for a while. Ops on these tell
shapes and lifetimes as real ones do. They say that they are on a CPU, because autograd wants a real
device behind any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.errors import RekindleError
from rekindle.planner.trace.emulate_cuda_ops import AsOnCuda
from rekindle.torch_private.dispatch_modes import ASKS_DEVICE, TorchDispatchMode, past_modes
from rekindle.torch_private.fake_mode import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from rekindle.torch_private.pytrees import tree_leaves, tree_map
from rekindle.torch_private.storages import storage_key

CPU = torch.device("cpu")


class Fakes:
    """Fake tensors in the place of others, one for each, that share memory where those do."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[int, Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._alive: list[Tensor] = []
        """So that no address is used twice."""
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor, which is a parameter if that is one."""
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
        """The fake of a tensor from somewhere else, unless it is one or has whole numbers."""
        if not isinstance(leaf, Tensor) or _is_whole(leaf):
            return leaf
        if isinstance(leaf, FakeTensor):
            return leaf if leaf.fake_mode is self._mode else self.of(leaf)
        if type(leaf) not in _PLAIN:
            return leaf
        if leaf.is_leaf and leaf.requires_grad:
            self._gradients.setdefault(id(leaf), (leaf, leaf.grad))
        return self.of(leaf)

    def restore_gradients(self) -> None:
        """Of tensors from somewhere else: as they were."""
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
    """An error for tensors of which no fake can be made."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (*_PLAIN, FakeTensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}: without memory, plain tensors can be "
                "profiled. Profile the model before it is sharded or quantized."
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} is not strided: it cannot be profiled without memory")


class _FakeOrWhole(TorchDispatchMode):
    """What ops are given is fake, wherever it comes from, but for small tensors of whole numbers.

    Models look at positions and masks, to leave out what is not needed. So whole numbers that are
    made from nothing fake are real: the model finds what it would.
    """

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(map(_is_whole, given)):
            return self._run_whole(func, args, kwargs)
        if not all(isinstance(tensor, FakeTensor) for tensor in given):
            args, kwargs = tree_map(self._fakes.of_foreign, (args, kwargs))
        return func(*args, **kwargs)

    def _run_whole(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass
        else:
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if not made or not all(tensor.device == CPU and _has_whole(tensor) for tensor in made):
                return out
        return past_modes(partial(func, *args, **kwargs))


def _is_whole(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device == CPU and _has_whole(tensor)


def _has_whole(tensor: Tensor) -> bool:
    """Whether these are whole numbers, or truths, and not many."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_whole and tensor.numel() <= _MANY


_MANY = 1 << 18
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


@contextmanager
def faked(model: nn.Module, batch: Any, *, as_on: str = "cpu") -> Iterator[Any]:
    """Inside, the model's tensors are fake, as on a device; gives the batch with fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode)
    own = list(places_of(model))
    try:
        for tensors, name, tensor in own:
            tensors[name] = fakes.of(tensor)
        given = tree_map(fakes.of_foreign, batch)
        on_device = nullcontext() if as_on == "cpu" else AsOnCuda()
        with on_device, mode, _FakeOrWhole(fakes):
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


def places_of(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Where a model's tensors are: what holds them, the key there, and the tensor.

    In a list or a dict that is an attribute, parameters alone: other tensors there come and go.
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
            for index, tensor in enumerate(module._flat_weights):
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    yield module._flat_weights, index, tensor


def has_no_memory(tensor: Tensor) -> bool:
    """Whether there is nothing behind a tensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
