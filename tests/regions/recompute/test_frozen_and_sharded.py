"""Frozen weights, LoRA, and parameters whose data comes and goes (field notes 16, 31)."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from tests.toys import Block, Stack, assert_same_step, same_bits

Run = Callable[..., Any]


def plain(function: Run, *args: Any) -> Any:
    return function(*args)


class LoRa(nn.Module):
    """A frozen linear layer and a trainable low-rank one beside it."""

    def __init__(self, dim: int = 8, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, dim))
        self.up = nn.Parameter(torch.randn(dim, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


class LoRaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.first, self.second = LoRa(), LoRa()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


class LoRaStack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LoRaBlock() for _ in range(depth))

    def forward(self, x: Tensor, run: Run = plain) -> Tensor:
        for block in self.blocks:
            x = run(block, x)
        return x


def test_lora_on_a_frozen_base_has_the_plain_gradients() -> None:
    model, x = LoRaStack(), torch.randn(4, 8)
    assert_same_step(
        lambda: model(x), lambda: model(x, rekindle.checkpoint), list(model.parameters())
    )


def test_an_input_without_grad_does_not_lose_the_gradients_of_the_parameters() -> None:
    """Field note 16: no `enable_input_require_grads` needed."""
    block, x = Block(), torch.randn(4, 8)
    assert_same_step(
        lambda: block(x), lambda: rekindle.checkpoint(block, x), list(block.parameters())
    )


def test_a_frozen_block_between_trained_ones_passes_the_gradient_on() -> None:
    model, x = Stack(depth=3), torch.randn(4, 8)
    model.blocks[1].requires_grad_(False)
    assert_same_step(
        lambda: model(x), lambda: model(x, rekindle.checkpoint), list(model.parameters())
    )
    assert all(p.grad is None for p in model.blocks[1].parameters())


def test_a_wholly_frozen_region_with_an_input_without_grad_holds_nothing() -> None:
    block, x = Block().requires_grad_(False), torch.randn(4, 8)
    y = rekindle.checkpoint(block, x)
    assert not y.requires_grad


def test_weights_tied_between_a_region_and_its_outside() -> None:
    table, block = nn.Embedding(10, 8), Block()
    index = torch.tensor([1, 2, 2, 7])

    def program(run: Run) -> Tensor:
        x = run(table, index)
        x = run(block, x)
        return run(nn.functional.linear, x, table.weight)

    assert_same_step(
        lambda: program(plain),
        lambda: program(rekindle.checkpoint),
        [table.weight, *block.parameters()],
    )


# A toy of ZeRO-3: a parameter's data is there only while its layer runs.


class Sharded:
    """Takes the data of a model's parameters away, and gathers it around each layer's run."""

    def __init__(self, model: nn.Module, way: str) -> None:
        self.way = way
        self.shards: dict[nn.Parameter, Tensor] = {}
        self.going_back: set[nn.Module] = set()
        for module in model.modules():
            if not list(module.parameters(recurse=False)):
                continue
            for p in module.parameters(recurse=False):
                self.shards[p] = p.data.clone()
            module.register_forward_pre_hook(lambda m, args: self.gather(m))
            module.register_forward_hook(lambda m, args, out: self.after_forward(m))
            module.register_full_backward_pre_hook(lambda m, grad: self.before_backward(m))
            module.register_full_backward_hook(lambda m, *grads: self.after_backward(m))
            self.release(module)

    def after_forward(self, module: nn.Module) -> None:
        if module not in self.going_back:
            self.release(module)

    def before_backward(self, module: nn.Module) -> None:
        self.going_back.add(module)
        self.gather(module)

    def after_backward(self, module: nn.Module) -> None:
        self.going_back.remove(module)
        self.release(module)

    def gather(self, module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            if self.way == "resized storage":
                p.untyped_storage().resize_(self.shards[p].nbytes)
                with torch.autograd._unsafe_preserve_version_counter(p), torch.no_grad():
                    p.copy_(self.shards[p])
            else:
                p.data = self.shards[p].clone()

    def release(self, module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            if self.way == "resized storage":
                p.untyped_storage().resize_(0)
            else:
                p.data = torch.empty(0, dtype=p.dtype)


WAYS = ["exchanged data", "resized storage"]


def _step(model: nn.Module, x: Tensor, run: Run) -> list[Tensor | None]:
    x.grad = None
    model(x, run).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def _assert_sharded_alike(model: nn.Module, x: Tensor, way: str, run: Run) -> None:
    expected = _step(copy.deepcopy(model), x, plain)
    Sharded(model, way)
    for i, (a, b) in enumerate(zip(expected, _step(model, x, run), strict=True)):
        assert same_bits(a, b), f"gradient {i} differs"


class Leaf(nn.Module):
    """One layer per parameter set, so that hooks gather exactly what a layer needs."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        if frozen:
            self.first.requires_grad_(False)
            self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(nn.functional.gelu(self.first(x)))


class Leaves(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaf(frozen) for _ in range(3))

    def forward(self, x: Tensor, run: Run = plain) -> Tensor:
        for block in self.blocks:
            x = run(block, x)
        return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_parameters_that_are_there_only_while_their_layer_runs(way: str, frozen: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    _assert_sharded_alike(Leaves(frozen), x, way, rekindle.checkpoint)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(
    "options",
    [{"early_stop": False}, {"determinism_check": "values"}, {"debug": True}],
    ids=str,
)
def test_parameters_that_come_and_go_with(options: dict[str, Any], frozen: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    run = functools.partial(rekindle.checkpoint, **options)
    _assert_sharded_alike(Leaves(frozen), x, "exchanged data", run)


def test_parameters_that_come_and_go_in_nested_regions() -> None:
    x = torch.randn(4, 8, requires_grad=True)

    def run(block: Leaf, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            y = nn.functional.gelu(rekindle.checkpoint(block.first, x))
            return x + rekindle.checkpoint(block.second, y)

        return rekindle.checkpoint(outer, x)

    _assert_sharded_alike(Leaves(False), x, "exchanged data", run)


def test_lora_whose_frozen_base_comes_and_goes() -> None:
    """The adapters stay; the base is gathered for its layer's run alone (transformers #47254)."""
    model, x = LoRaStack(depth=2), torch.randn(4, 8)
    expected = _step(copy.deepcopy(model), x, plain)
    for block in model.blocks:
        for layer in (block.first.base, block.second.base, block.norm):
            Sharded(layer, "exchanged data")
    for i, (a, b) in enumerate(zip(expected, _step(model, x, rekindle.checkpoint), strict=True)):
        assert same_bits(a, b), f"gradient {i} differs"


def test_nothing_of_a_gathered_parameter_is_held_after_forward_or_after_backward() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    gathered: list[StorageWeakRef] = []

    def region(x: Tensor) -> Tensor:
        layer.weight.data = torch.ones(8, 8)
        gathered.append(StorageWeakRef(layer.weight.untyped_storage()))
        y = layer(x).exp()
        layer.weight.data = torch.empty(0)
        return y

    y = rekindle.checkpoint(region, x)
    assert [storage.expired() for storage in gathered] == [True]
    x_only = torch.autograd.grad(y.sum(), x)
    layer.weight.data = torch.empty(0)
    assert [storage.expired() for storage in gathered] == [True, True]
    assert x_only[0].shape == x.shape


def test_a_parameter_exchanged_for_good_between_forward_and_backward_is_used_as_it_is() -> None:
    """An optimizer that swaps `.data` (as torch's checkpoint: the replay sees what is there)."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    y = rekindle.checkpoint(lambda x: layer(x.exp()), x).sum()
    layer.weight.data = layer.weight.data.clone()
    y.backward()
    (expected,) = torch.autograd.grad(layer(x.exp()).sum(), x)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("check", ["default", "none", "values"])
def test_a_parameter_that_is_saved_itself_may_be_gone_when_the_replay_ends(check: str) -> None:
    """Not a view of it, as a Linear saves: then a replay that runs to its end must still notice."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 2.0))
            self.full = self.weight.data.clone()

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.full.clone()
            y = (x * self.weight).sin()
            self.weight.data = torch.empty(0)
            return y

    x = torch.ones(4, requires_grad=True)
    for early_stop in (True, False):
        x.grad = None
        y = rekindle.checkpoint(Gate(), x, early_stop=early_stop, determinism_check=check)
        y.sum().backward()
        assert same_bits(x.grad, torch.full((4,), 2.0).cos() * 2)
