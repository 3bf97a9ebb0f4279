"""Regions by what autograd saves: the same gradients, less memory, and no op is looked at."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import gelu, silu
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from benchmarks.decoder import SHAPES, Decoder
from rekindle.offload.context import keep_on_device
from rekindle.offload.derive import Derivation
from rekindle.regions.saved_indices import recomputable_indices
from rekindle.strategy import SavedIndices
from rekindle.torch_private.saved_tensor_hooks import top_hooks
from rekindle.torch_private.storages import storage_from_reference
from tests.toys import leaf, same_bits

ALL = SavedIndices(tuple(range(1000)))


class Gated(nn.Module):
    """`down(silu(gate) * up)`, as in most language models."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Program(nn.Module):
    """A function of one tensor, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x @ self.weight) @ self.weight


def written(y: Tensor) -> Tensor:
    """A product that is changed behind autograd's back."""
    product = silu(y) * y
    product.data.add_(1.0)
    return product


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    leaves = [x, *module.parameters()]
    return list(torch.autograd.grad(module(x).square().sum(), leaves))


def applied(module: nn.Module, what: SavedIndices = ALL) -> nn.Module:
    rekindle.apply(module, {"": what})
    return module


def assert_same(module: nn.Module, x: Tensor, dropped: int) -> None:
    """The gradients of the plain run, twice, and so many activations dropped each time."""
    expected = gradients(module, x)
    applied(module)
    for _ in range(2):
        with rekindle.observe() as seen:
            assert all(map(same_bits, gradients(module, x), expected))
        assert seen.total.activations_dropped == dropped


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, requires_grad=True)


def test_what_one_op_gives_back_is_dropped_and_made_again(x: Tensor) -> None:
    module = Gated()
    expected = gradients(module, x)
    with rekindle.observe() as seen:
        found = gradients(applied(module), x)
    assert all(map(same_bits, found, expected))
    assert (seen.total.activations_dropped, seen.total.bytes_dropped) == (2, 2 * 4 * 8 * 4)
    assert seen.total.ops_replayed == 2


def test_after_the_forward_nothing_holds_what_is_derived(x: Tensor) -> None:
    made: list[StorageWeakRef] = []

    def note(gate: Tensor) -> Tensor:
        product = silu(gate) * (gate + 1)
        made.append(StorageWeakRef(product.untyped_storage()))
        return product

    module = Program(note)
    loss = module(x).sum()
    assert storage_from_reference(made[-1]) is not None
    del loss
    loss = applied(module)(x).sum()
    assert storage_from_reference(made[-1]) is None
    loss.backward()


def test_no_op_is_looked_at(x: Tensor) -> None:
    modes: list[int] = []

    def note(gate: Tensor) -> Tensor:
        modes.append(torch._C._len_torch_dispatch_stack())
        return silu(gate) * gate

    applied(Program(note))(x)
    assert modes == [0]


def test_only_the_numbers_that_are_given_are_derived(x: Tensor) -> None:
    module = Gated()
    numbers = recomputable_indices(lambda: module(x), 20)
    assert len(numbers) == 2
    with rekindle.observe() as seen:
        gradients(applied(module, SavedIndices(numbers[:1])), x)
    assert seen.total.activations_dropped == 1


@pytest.mark.parametrize(
    ("function", "dropped"),
    [
        (lambda y: gelu(y) * y, 2),
        (lambda y: gelu(y, approximate="tanh").t().contiguous().t(), 0),
        (lambda y: gelu(y, approximate="tanh"), 1),
        (lambda y: (y * y.sum(0)).t().t(), 1),
        (lambda y: (y * 2.0) / (y.abs() + 1), 1),
        (lambda y: (silu(y) * y)[:, :].expand(4, 8), 2),
        (lambda y: torch.nn.functional.hardswish(y) * y.sin(), 2),
        (lambda y: silu(silu(silu(y) * y) * y), 4),  # all but one: two in a row at most
        (lambda y: (silu(y) * y).mul_(2.0), 1),
        (lambda y: (silu(y) * y).to(torch.float64).float(), 1),
        (lambda y: y * y, 1),
        (lambda y: torch.cat([(silu(y) * y)[:, ::2], (y * 3.0)[:, 1::2]], 1), 1),
    ],
)
def test_gradients_are_those_of_the_plain_run(
    function: Callable[[Tensor], Tensor], dropped: int, x: Tensor
) -> None:
    assert_same(Program(function), x, dropped)


def test_memory_that_is_used_again_is_told_apart() -> None:
    torch.manual_seed(0)
    model = Decoder(replace(SHAPES["tiny"], layers=6), dtype=torch.float32)
    x = torch.randn(2, 8, 32, requires_grad=True)
    expected = gradients(model, x)
    rekindle.apply(model, ALL)
    for _ in range(3):
        assert all(map(same_bits, gradients(model, x), expected))


def test_what_was_changed_behind_autograds_back_is_kept(x: Tensor) -> None:
    assert_same(Program(written), x, dropped=1)  # not the product, but silu's result


def test_of_blocks_that_are_alike_each_is_looked_at(x: Tensor) -> None:
    model = nn.Sequential(Program(lambda y: silu(y) * y), Program(written))
    expected = gradients(model, x)
    rekindle.apply(model, ALL)
    with rekindle.observe() as seen:
        assert all(map(same_bits, gradients(model, x), expected))
    assert seen.total.activations_dropped == 2 + 1


def test_the_same_memory_seen_as_another_type_is_kept(x: Tensor) -> None:
    def show(y: Tensor) -> Tensor:
        product = silu(y) * y
        return product @ product.t() @ (product.view(torch.int32) * y)

    assert_same(Program(show), x, dropped=2)  # the product too, though its other view holds it


def test_complex_results_and_their_parts(x: Tensor) -> None:
    def part(y: Tensor) -> Tensor:
        product = torch.complex(y, y + 1) * torch.complex(y - 1, y)
        return product.real * y + product.imag * product.abs()

    assert_same(Program(part), x, dropped=1)


class Changing(torch.autograd.Function):
    """Its backward changes what it saved."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        changed: Tensor = y.mul_(gradients[0])
        return changed


def test_a_backward_that_changes_what_it_is_given_is_an_error_as_ever(x: Tensor) -> None:
    def change(y: Tensor) -> Tensor:
        product = silu(y) * y
        return (product @ product.t()) @ Changing.apply(product)

    module = Program(change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(module, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(applied(module), x)


class Rounding(TorchDispatchMode):
    """Has products be something else."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.round(decimals=1) if func is torch.ops.aten.mul.Tensor else out


def test_under_a_mode_that_changes_results_they_are_kept(x: Tensor) -> None:
    module = Gated()

    def found() -> list[Tensor]:
        with Rounding():
            loss = module(x).square().sum()
        return list(torch.autograd.grad(loss, [x, *module.parameters()]))

    expected = found()
    applied(module)
    with rekindle.observe() as seen:
        assert all(map(same_bits, found(), expected))
    assert seen.total.activations_dropped == 0


def test_nested_tensors_are_kept() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    parts = [torch.randn(3, 8), torch.randn(5, 8)]

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(silu(x) * x, weight)

    def found(module: nn.Module) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that they are a prototype
            x = torch.nested.nested_tensor(parts, requires_grad=True)
            loss = module(x).to_padded_tensor(0.0).sum()
        return torch.autograd.grad(loss, weight)[0]

    module = Nested()
    expected = found(module)
    applied(module)
    with rekindle.observe() as seen:
        assert same_bits(found(module), expected)
    assert seen.total.activations_dropped == 0


def test_what_it_would_be_made_from_was_changed(x: Tensor) -> None:
    other = torch.ones(8, requires_grad=True)
    module = applied(Program(lambda y: y * other))
    loss = module(x).sum()
    with torch.no_grad():
        other.mul_(2)
    with pytest.raises(
        rekindle.RekindleError, match="was to be made from it again; change it after"
    ):
        torch.autograd.grad(loss, module.weight)


def test_what_is_changed_in_place_after_it_was_saved_is_an_error_as_ever(x: Tensor) -> None:
    kept: list[Tensor] = []

    def change(y: Tensor) -> Tensor:
        kept.append(silu(y) * y)
        return kept[-1]

    module = Program(change)
    loss = applied(module)(x).sum()
    with torch.no_grad():
        kept[-1].add_(1.0)
    with pytest.raises(rekindle.RekindleError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_is_the_same_and_nothing_is_left_in_between(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StorageWeakRef] = []
    make = Derivation.make

    def noted(derivation: Derivation, cure: str) -> Tensor:
        result = make(derivation, cure)
        made.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(Derivation, "make", noted)
    loss = applied(Gated())(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    gc.collect()
    assert [storage_from_reference(result) for result in made] == [None] * 2
    assert same_bits(torch.autograd.grad(loss, x)[0], first)
    assert len(made) == 4


def test_gradients_of_gradients_are_those_of_the_plain_run(x: Tensor) -> None:
    def second(module: nn.Module) -> Tensor:
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    module = Gated()
    expected = second(module)
    assert same_bits(second(applied(module)), expected)


def test_a_forward_that_fails_leaves_no_hooks(x: Tensor) -> None:
    def fail(y: Tensor) -> Tensor:
        raise KeyError(y.shape)

    with pytest.raises(KeyError):
        applied(Program(fail))(x)
    assert top_hooks(False) is None


def test_inside_a_region_that_is_recomputed(x: Tensor) -> None:
    module = Gated()
    expected = gradients(module, x)
    applied(module)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Any:
            return rekindle.checkpoint(self.inner, x)

    assert all(map(same_bits, gradients(Outer(), x), expected))


def test_under_a_transform_nothing_is_dropped(x: Tensor) -> None:
    module = Gated()

    def loss(x: Tensor) -> Tensor:
        return module(x).sum()

    expected = torch.func.grad(loss)(x.detach())
    applied(module)
    with rekindle.observe() as seen:
        assert same_bits(torch.func.grad(loss)(x.detach()), expected)
    assert seen.total.activations_dropped == 0


def test_a_mode_around_the_backward_sees_what_is_made_again(x: Tensor) -> None:
    class Silus(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.silu.default
            return func(*args, **(kwargs or {}))

    loss = applied(Gated())(x).sum()
    with Silus() as seen:
        loss.backward()
    assert seen.count == 1


class OpsSeen(TorchDispatchMode):
    """Notes the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_packed_past_the_modes_that_see_ops() -> None:
    x = leaf(4)
    with OpsSeen() as seen, keep_on_device():
        out = x.exp()
    assert seen.names == ["aten::exp"]
    out.sum().backward()
    assert torch.equal(x.grad, x.exp())
