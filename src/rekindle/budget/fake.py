"""A model's training step on tensors without memory: nothing is allocated, nothing computed.

Parameters, buffers and the batch have fake tensors in their place for a while. Ops on these tell
shapes and lifetimes as real ones do, so that bytes are exact; times come from the table of devices,
or from a profile that was measured. Fake tensors say that they are on a CPU, because autograd wants
a real device behind any other.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rekindle.budget.as_on_cuda import AsOnCuda
from rekindle.budget.devices import Device, OpClock, device_named, device_of, known_devices
from rekindle.budget.profiling import Bench, Step, measure
from rekindle.budget.values import Profile
from rekindle.errors import RekindleError
from rekindle.internals import storage_key, without_modes

CPU = torch.device("cpu")
_INF = float("inf")
_TIMELESS = Device("none", _INF, _INF, _INF, _INF, link=0.0, memory_bytes=0, launch=0.0)


def imagine(model: nn.Module, batch: Any, optimizer: Any, like: str | Profile | None) -> Profile:
    """The profile of a model's training step as on a device that need not be there."""
    refuse_what_has_no_fake(model)
    if isinstance(like, Profile):
        return _imagine_by(like, model, batch, optimizer)
    device = _device(model, like)
    with faked(model, batch, device.name) as given, OpClock(device) as clock:
        bench = Bench(CPU, device.name, clock, device.bytes_per_second)
        return measure(model, given, optimizer, bench)


def _imagine_by(like: Profile, model: nn.Module, batch: Any, optimizer: Any) -> Profile:
    """With blocks, and times of the rest, as they were measured."""
    if type(model).__name__ != like.model:
        raise ValueError(
            f"The profile is of a {like.model}, but the model is a {type(model).__name__}"
        )
    shapes = Step(model, batch).shapes()
    if shapes != like.batch:
        raise ValueError(
            f"The profile is of a batch of {like.batch}, but this one is of {shapes}: times of "
            "another batch cannot be told from it"
        )
    with faked(model, batch, like.device) as given, OpClock(_TIMELESS) as clock:
        bench = Bench(CPU, like.device, clock, like.bytes_per_second, known=like)
        return replace(measure(model, given, optimizer, bench), rest_seconds=like.rest_seconds)


def _device(model: nn.Module, like: str | None) -> Device:
    if like is not None:
        return device_named(like)
    first = next(model.parameters())
    device = None if has_no_memory(first) else device_of(first.device)
    if device is None:
        raise ValueError(
            'With device="meta", like= says which device the times are those of: a profile that '
            f"was measured, or one of {known_devices()}"
        )
    return device


class Fakes:
    """Fake tensors in the place of others, one for each, that share memory where those do."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[int, Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._alive: list[Tensor] = []
        """So that no address is used twice."""

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
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer, FakeTensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}: without memory, plain tensors can be "
                "profiled. Profile the model before it is sharded or quantized."
            )
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} is not strided: it cannot be profiled without memory")


class _WholeNumbers(TorchDispatchMode):
    """Small tensors of whole numbers that are made from nothing fake are real.

    Models look at positions and masks, to leave out what is not needed: they find what they would.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(map(_is_whole, given)):
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not given:
                raise
        else:
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            if not made or not all(tensor.device == CPU and _has_whole(tensor) for tensor in made):
                return out
        with without_modes():
            return func(*args, **kwargs)


def _is_whole(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device == CPU and _has_whole(tensor)


def _has_whole(tensor: Tensor) -> bool:
    """Whether these are whole numbers, or truths, and not many."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return is_whole and tensor.numel() <= _MANY


_MANY = 1 << 18


@contextmanager
def faked(model: nn.Module, batch: Any, name: str) -> Iterator[Any]:
    """Inside, the model's tensors are fake, as on a device; gives the batch with fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode)
    own = list(_places(model))
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        for tensors, name, tensor in own:
            tensors[name] = fakes.of(tensor)
        given = tree_map(lambda leaf: _given(leaf, fakes), batch)
        on_device = nullcontext() if name == "cpu" else AsOnCuda()
        with on_device, mode, _WholeNumbers():  # type: ignore[no-untyped-call]
            yield given
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RekindleError(
            f"The step looks at the values of a tensor ({error.func}), and without memory there "
            "are none. Give it what it would find out, such as a mask, or profile it on a device."
        ) from error
    finally:
        for tensors, name, tensor in own:
            tensors[name] = tensor
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _given(leaf: Any, fakes: Fakes) -> Any:
    return leaf if not isinstance(leaf, Tensor) or _is_whole(leaf) else fakes.of(leaf)


def _places(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Where a model's tensors are: what holds them, the key there, and the tensor."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    yield tensors, name, tensor
        if isinstance(module, nn.RNNBase):
            for index, tensor in enumerate(module._flat_weights):
                if tensor is not None:
                    yield module._flat_weights, index, tensor


def has_no_memory(tensor: Tensor) -> bool:
    """Whether there is nothing behind a tensor."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
