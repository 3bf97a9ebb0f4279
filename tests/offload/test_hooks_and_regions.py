"""Saved-tensor hooks and checkpointed regions, inside and around offload."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from tests.offload.as_plain import assert_as_plain, assert_plain_gradients, padded
from tests.offloading import STEPS, leaf, spilling
from tests.toys import Stack, assert_same_step, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def test_hooks_on_tensors_and_modules_see_what_they_would_see_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        found: list[Tensor] = []
        handles = [
            block.register_full_backward_hook(
                lambda _, gin, gout: found.extend(g.clone() for g in (*gin, *gout))
            )
            for block in model.blocks
        ]
        with context:
            h = model(x)
            h.register_hook(lambda g: g * 2)
        h.sum().backward()
        for handle in handles:
            handle.remove()
        return found

    assert_as_plain(step)


def test_hooks_inside_take_what_is_saved_inside_them() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = padded(x)
        with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            h = padded(h)
        return padded(padded(h))

    assert_plain_gradients(run, [x])


def test_hooks_outside_do_not_see_what_is_saved_inside() -> None:
    x, packed = leaf(16), []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t), spilling():
        out = padded(padded(x))
    out.sum().backward()
    assert packed == []


def test_save_on_cpu_inside_and_outside_is_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)

    def run() -> Tensor:
        with save_on_cpu():
            h = model.blocks[0](x)
        return model(h)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with save_on_cpu(), context:
            loss = run().sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    assert_as_plain(step)


def test_offload_in_offload_is_plain() -> None:
    model, x = Stack(depth=5), leaf(4, 8)

    def run(block: nn.Module, h: Tensor) -> Tensor:
        if block in (model.blocks[1], model.blocks[3]):
            with spilling(min_bytes=2):
                return block(h)
        return block(h)

    assert_plain_gradients(lambda: model(x, run=run), [x, *model.parameters()])


def test_offload_in_itself_is_plain() -> None:
    model, x, offload = Stack(depth=4), leaf(4, 8), spilling()

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context, context:
            loss = model(x).sum()
        return list(torch.autograd.grad(loss, [x, *model.parameters()]))

    expected = step(nullcontext())
    for _ in range(STEPS):
        assert all(map(same_bits, step(offload), expected))


def test_where_hooks_are_disabled_the_with_says_so_and_leaves_no_trace() -> None:
    x, offload = leaf(16), spilling()
    with (
        disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
        offload,
    ):
        pass
    with rekindle.observe() as seen:
        with offload:
            loss = padded(padded(x)).sum()
        loss.backward()
    assert seen.spill.tensors_out == 5


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "ours": rekindle.checkpoint,
    "ours, reentrant": lambda f, *a: rekindle.checkpoint(f, *a, use_reentrant=True),
    "torch's": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
    "torch's, reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpointed_regions_inside_are_plain(checkpoint: Callable[..., Any]) -> None:
    model, x = Stack(depth=5, drop=0.2), leaf(4, 8)
    assert_plain_gradients(lambda: model(x, run=checkpoint), [x, *model.parameters()])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_a_checkpointed_region_around_is_plain(checkpoint: Callable[..., Any]) -> None:
    model, x = Stack(depth=4, drop=0.2), leaf(4, 8)

    def region(h: Tensor) -> Tensor:
        h = model.blocks[0](h)
        with spilling():
            h = model.blocks[2](model.blocks[1](h))
        return model.blocks[3](h)

    for seed in range(STEPS):
        assert_same_step(
            lambda: model(x),
            lambda: checkpoint(region, x),
            [x, *model.parameters()],
            seed=seed,
        )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def test_checkpoint_around_offload_around_checkpoint_is_plain(
    checkpoint: Callable[..., Any],
) -> None:
    model, x = Stack(depth=4, drop=0.2), leaf(4, 8)

    def region(h: Tensor) -> Tensor:
        with spilling():
            return model(h, run=checkpoint)

    for seed in range(STEPS):
        assert_same_step(
            lambda: model(x),
            lambda: checkpoint(region, x),
            [x, *model.parameters()],
            seed=seed,
        )
