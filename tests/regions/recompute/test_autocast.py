"""Autocast: a replay casts as its forward did, whatever the cache held (field note 5)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import Block, Stack, assert_same_step, gradients, same_bits


def bf16(**options: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@pytest.fixture
def block() -> Block:
    return Block()


Run = Callable[..., Any]


def plain(function: Run, *args: Any) -> Any:
    return function(*args)


def assert_same_with(program: Callable[[Run], Any], leaves: list[Tensor], **options: Any) -> None:
    """A program gives the same step whether it runs its regions plainly or checkpointed."""
    assert_same_step(
        lambda: program(plain), lambda: program(rekindle.checkpoint), leaves, **options
    )


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_autocast_around_a_region(block: Block, x: Tensor, cache: bool) -> None:
    def program(run: Run) -> Tensor:
        with bf16(cache_enabled=cache):
            return run(block, x)

    assert_same_with(program, [x, *block.parameters()])


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_autocast_inside_a_region(block: Block, x: Tensor, cache: bool) -> None:
    def region(x: Tensor) -> Tensor:
        with bf16(cache_enabled=cache):
            return block(x)

    assert_same_with(lambda run: run(region, x), [x, *block.parameters()])


def test_autocast_switched_off_inside_a_region(block: Block, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x = block(x)
        with torch.autocast("cpu", enabled=False):
            return block(x.float())

    def program(run: Run) -> Tensor:
        with bf16():
            return run(region, x)

    assert_same_with(program, [x, *block.parameters()])


def test_autocast_switched_on_inside_a_region_that_has_it_off(block: Block, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with bf16():
            x = block(x)
        return block(x.float())

    def program(run: Run) -> Tensor:
        with bf16(), torch.autocast("cpu", enabled=False):
            return run(region, x)

    assert_same_with(program, [x, *block.parameters()])


def test_autocast_of_another_dtype_inside_a_region(block: Block, x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x = block(x)
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            return block(x)

    def program(run: Run) -> Tensor:
        with bf16(cache_enabled=False):  # with it, the plain run mixes up the two dtypes
            return run(region, x)

    assert_same_with(program, [x, *block.parameters()])


def test_a_region_without_autocast_between_regions_with_it(block: Block, x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        with bf16():
            y = run(block, x)
        y = run(block, y)
        with bf16():
            return run(block, y)

    assert_same_with(program, [x, *block.parameters()])


def test_backward_inside_the_autocast_of_its_forward(block: Block, x: Tensor) -> None:
    def step(run: Run) -> tuple[Any, list[Tensor | None], Tensor]:
        with bf16():
            return gradients(lambda: run(block, x), [x, *block.parameters()])

    for a, b in zip(step(plain)[1], step(rekindle.checkpoint)[1], strict=True):
        assert same_bits(a, b)


def test_backward_inside_an_autocast_that_its_forward_did_not_have(block: Block, x: Tensor) -> None:
    def backward(loss: Tensor) -> None:
        with bf16():
            loss.backward()

    assert_same_with(lambda run: run(block, x), [x, *block.parameters()], backward=backward)


def test_backward_inside_an_autocast_that_is_off(block: Block, x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        with bf16():
            return run(block, x)

    def backward(loss: Tensor) -> None:
        with torch.autocast("cpu", enabled=False):
            loss.backward()

    assert_same_with(program, [x, *block.parameters()], backward=backward)


def test_backward_inside_an_autocast_of_another_dtype(block: Block, x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        with bf16():
            return run(block, x)

    def backward(loss: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss.backward()

    assert_same_with(program, [x, *block.parameters()], backward=backward)


def test_autocast_is_as_before_after_a_replay(block: Block, x: Tensor) -> None:
    with bf16():
        y = rekindle.checkpoint(block, x)
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert not torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


# What the cache holds when a region is called: each of these ran before it, in the same autocast.


def nothing(block: Block, x: Tensor) -> None:
    pass


def without_grad(block: Block, x: Tensor) -> None:
    with torch.no_grad():
        block(x)


def with_grad(block: Block, x: Tensor) -> None:
    block(x)


def in_inference_mode(block: Block, x: Tensor) -> None:
    with torch.inference_mode():
        block(x)


def in_a_region(block: Block, x: Tensor) -> None:
    rekindle.checkpoint(block, x)


def in_a_region_and_back(block: Block, x: Tensor) -> None:
    rekindle.checkpoint(block, x).sum().backward()
    x.grad = None
    block.zero_grad()


def half_of_it(block: Block, x: Tensor) -> None:
    with torch.no_grad():
        block.mlp.up(x)


CACHED_BY = [
    nothing,
    without_grad,
    with_grad,
    in_inference_mode,
    in_a_region,
    in_a_region_and_back,
    half_of_it,
]


@pytest.mark.parametrize("before", CACHED_BY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_casts_cached_outside_a_region_do_not_change_its_gradients(
    block: Block, x: Tensor, before: Run, inside: bool
) -> None:
    leaves = [x, *block.parameters()]

    def step(run: Run) -> list[Tensor | None]:
        with bf16():
            before(block, x)
            for leaf in leaves:
                leaf.grad = None
            y = run(block, x)
            if inside:
                y.float().sum().backward()
        if not inside:
            y.float().sum().backward()
        return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]

    for a, b in zip(step(plain), step(rekindle.checkpoint), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("before", CACHED_BY, ids=lambda f: f.__name__)
def test_casts_cached_outside_do_not_change_what_the_values_check_finds(
    block: Block, x: Tensor, before: Run
) -> None:
    with bf16():
        before(block, x)
        y = rekindle.checkpoint(block, x, determinism_check="values")
    y.float().sum().backward()
    assert x.grad is not None


def test_a_weight_used_twice_in_a_region(x: Tensor) -> None:
    layer = nn.Linear(8, 8)

    def program(run: Run) -> Tensor:
        with bf16():
            return run(lambda x: layer(layer(x).relu()), x)

    assert_same_with(program, [x, *layer.parameters()])


def test_a_weight_used_without_and_with_grad_in_a_region(x: Tensor) -> None:
    layer = nn.Linear(8, 8)

    def region(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = layer(x)
        return layer(x) * scale

    def program(run: Run) -> Tensor:
        with bf16():
            return run(region, x)

    assert_same_with(program, [x, *layer.parameters()])


def test_regions_that_share_a_weight(x: Tensor) -> None:
    layer = nn.Linear(8, 8)

    def program(run: Run) -> Tensor:
        with bf16():
            return run(layer, run(layer, x).relu())

    assert_same_with(program, [x, *layer.parameters()])


def test_a_weight_shared_by_a_region_and_the_code_after_it(x: Tensor) -> None:
    layer = nn.Linear(8, 8)

    def program(run: Run) -> Tensor:
        with bf16():
            return layer(run(layer, x).relu())

    assert_same_with(program, [x, *layer.parameters()])


def test_a_region_called_twice_on_the_same_input(block: Block, x: Tensor) -> None:
    def program(run: Run) -> tuple[Tensor, Tensor]:
        with bf16():
            return run(block, x), run(block, x)

    assert_same_with(program, [x, *block.parameters()])


def test_a_weight_that_is_an_argument_of_two_regions(x: Tensor) -> None:
    weight = nn.Parameter(torch.randn(8, 8))

    def program(run: Run) -> Tensor:
        with bf16():
            y = run(nn.functional.linear, x, weight)
            return run(nn.functional.linear, y.relu(), weight)

    assert_same_with(program, [x, weight])


def test_nested_regions_that_share_a_weight(x: Tensor) -> None:
    layer = nn.Linear(8, 8)

    def program(run: Run) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            return layer(run(layer, x).relu())

        with bf16():
            return run(outer, x)

    assert_same_with(program, [x, *layer.parameters()])


def test_autocast_inside_an_inner_region_only(x: Tensor) -> None:
    layer = nn.Linear(8, 8)

    def program(run: Run) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            with bf16():
                return layer(x)

        def outer(x: Tensor) -> Tensor:
            return layer(run(inner, layer(x)).float())

        return run(outer, x)

    assert_same_with(program, [x, *layer.parameters()])


def test_a_stack_of_regions_with_dropout_under_autocast(x: Tensor) -> None:
    model = Stack(depth=3, drop=0.3)

    def program(run: Run) -> Tensor:
        with bf16():
            return model(x, run)

    assert_same_with(program, [x, *model.parameters()])


def test_several_steps_with_a_validation_pass_in_each_autocast(x: Tensor) -> None:
    def train(run: Run) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(depth=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with bf16():
                with torch.no_grad():
                    model(x.detach())
                loss = model(x.detach(), run).float().square().sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    for a, b in zip(train(plain), train(rekindle.checkpoint), strict=True):
        assert same_bits(a, b)


def test_a_weight_changed_in_place_while_its_cast_is_cached(x: Tensor) -> None:
    """The plain run goes on with the stale cast; so does the region, and so must its replay."""

    def step(run: Run) -> list[Tensor | None]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        with bf16():
            layer(x)
            with torch.no_grad():
                layer.weight.add_(1)
            x.grad = None
            run(lambda x: layer(x).exp(), x).float().sum().backward()
        return [x.grad, layer.weight.grad]

    for a, b in zip(step(plain), step(rekindle.checkpoint), strict=True):
        assert same_bits(a, b)


def test_the_reentrant_variant_under_autocast(block: Block, x: Tensor) -> None:
    def program(run: Run) -> Tensor:
        with bf16(cache_enabled=False):
            return run(block, x)

    assert_same_step(
        lambda: program(plain),
        lambda: program(lambda f, *args: rekindle.checkpoint(f, *args, use_reentrant=True)),
        [x, *block.parameters()],
    )


def test_an_exception_in_forward_leaves_autocast_as_it_was(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            raise KeyError("in forward")

    with bf16():
        with pytest.raises(KeyError):
            rekindle.checkpoint(region, x)
        assert torch.is_autocast_enabled("cpu")


def test_an_exception_in_replay_leaves_autocast_as_it_was(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        x = x.exp()
        if rekindle.is_recomputing():
            raise KeyError("in replay")
        return x.exp()

    with bf16(cache_enabled=False):
        y = rekindle.checkpoint(region, x)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
