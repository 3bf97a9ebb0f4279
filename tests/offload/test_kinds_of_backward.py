"""Every way to run backward, any number of times and in any order, is plain under offload."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.offload.as_plain import (
    assert_as_plain,
    assert_plain_gradients,
    branching,
    padded,
    plain_and_offloaded,
)
from tests.offloading import STEPS, leaf, spilling
from tests.toys import Stack, assert_same_step, gradients, same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


def test_backward_twice_has_plain_gradients_both_times() -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = branching(x, w).sum()
        first = torch.autograd.grad(loss, [x, w], retain_graph=True)
        return [*first, *torch.autograd.grad(loss, [x, w])]

    assert_as_plain(step)


def test_backward_twice_fetches_twice() -> None:
    x = leaf(16)
    for _ in range(STEPS):
        with rekindle.observe() as seen:
            with spilling():
                loss = padded(padded(x)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        # Seven activations, of which the last two stay.
        assert (seen.spill.tensors_out, seen.spill.tensors_in) == (5, 10)


def test_backward_after_the_graph_was_freed_raises_as_it_does_plain() -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    for context in plain_and_offloaded():
        with context:
            loss = branching(x, w).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@pytest.mark.parametrize("is_inside", [True, False])
def test_double_backward_has_plain_gradients(is_inside: bool) -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            loss = branching(x, w).sum()
            if is_inside:
                first = torch.autograd.grad(loss, [x, w], create_graph=True)
        if not is_inside:
            first = torch.autograd.grad(loss, [x, w], create_graph=True)
        penalty = sum((g * g).sum() for g in first)
        assert isinstance(penalty, Tensor)
        return [*first, *torch.autograd.grad(penalty, [x, w])]

    assert_as_plain(step)


def test_a_third_derivative_is_plain() -> None:
    x = leaf(16)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            h = padded(x.exp() * x.sin()).sum()
            for _ in range(2):
                (g,) = torch.autograd.grad(h, x, create_graph=True)
                h = g.sin().sum()
        return list(torch.autograd.grad(h, x))

    assert_as_plain(step)


def test_backward_to_some_inputs_is_plain() -> None:
    x, w, v = leaf(8, 8), leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        x.grad = w.grad = v.grad = None
        with context:
            loss = (branching(x, w) * branching(v, w)).sum()
        loss.backward(inputs=[v], retain_graph=True)
        assert x.grad is None
        first = v.grad
        loss.backward(inputs=[x, w])
        return [first, x.grad, w.grad]  # type: ignore[list-item]

    assert_as_plain(step)


def test_gradients_of_activations_are_plain() -> None:
    x, w = leaf(8, 8), leaf(8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            h = (x * 2).sin()
            h.retain_grad()
            k = h @ w
            loss = padded(k.exp()).sum()
        part = torch.autograd.grad(loss, k, retain_graph=True)
        loss.backward()
        return [*part, h.grad]  # type: ignore[list-item]

    assert_as_plain(step)


def test_batched_gradients_are_plain() -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    grads = torch.randn(3, 8, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        with context:
            out = branching(x, w)
        return list(torch.autograd.grad(out, [x, w], grads, is_grads_batched=True))

    assert_as_plain(step)


def test_jacobians_are_plain() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        def function(x: Tensor) -> Tensor:
            with context:
                return branching(x, w)

        whole = torch.autograd.functional.jacobian(function, x, vectorize=True)
        hessian = torch.autograd.functional.hessian(lambda x: function(x).sum(), x)
        return [whole, hessian]

    assert_as_plain(step)


def test_backward_inside_the_with_is_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)
    expected = gradients(lambda: model(x), [x, *model.parameters()])[1]
    for _ in range(STEPS):
        with spilling():
            found = gradients(lambda: model(x), [x, *model.parameters()])[1]
        assert all(map(same_bits, found, expected))


def test_several_steps_in_one_with_are_plain() -> None:
    model, x = Stack(depth=4), leaf(4, 8)
    expected = gradients(lambda: model(x), [x, *model.parameters()])[1]
    with spilling():
        for _ in range(STEPS + 2):
            found = gradients(lambda: model(x), [x, *model.parameters()])[1]
            assert all(map(same_bits, found, expected))


def test_a_with_around_each_layer_is_plain() -> None:
    model, x = Stack(depth=5), leaf(4, 8)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        with spilling():
            return block(x)

    with rekindle.observe() as seen:
        for _ in range(STEPS):
            assert_same_step(lambda: model(x), lambda: model(x, run=run), [x, *model.parameters()])
    assert seen.spill.tensors_out > 0


def test_gradients_add_up_over_micro_batches_as_plain() -> None:
    model = Stack(depth=3, drop=0.2)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        model.zero_grad()
        for size in (4, 2, 3):
            with context:
                loss = model(torch.randn(size, 8)).sum()
            loss.backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert_as_plain(step)


def test_forwards_before_any_of_their_backwards_are_plain() -> None:
    model = Stack(depth=3)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        model.zero_grad()
        losses = []
        for _ in range(3):
            with context:
                losses.append(model(torch.randn(4, 8)).sum())
        for i in (1, 0, 2):
            losses[i].backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    assert_as_plain(step)


def test_backward_of_the_step_before_while_the_next_is_under_way_is_plain() -> None:
    model = Stack(depth=3)
    inputs = torch.randn(6, 4, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        found: list[Tensor] = []
        before = None
        for x in inputs:
            with context:
                h = x
                for i, block in enumerate(model.blocks):
                    h = block(h)
                    if i == 1 and before is not None:
                        found += torch.autograd.grad(before, list(model.parameters()))
                before = h.sum()
        return found

    assert_as_plain(step)


def test_two_models_by_turns_under_the_same_options_are_plain() -> None:
    models = [Stack(depth=3, dim=8), Stack(depth=4, dim=16)]
    inputs = [leaf(4, 8), leaf(4, 16)]
    for _ in range(2 * STEPS):
        for model, x in zip(models, inputs, strict=True):
            assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)  # noqa: B023


def test_another_shape_in_every_step_is_plain() -> None:
    model = Stack(depth=3)
    for size in (4, 6, 4, 1, 9, 6, 4, 20, 2, 9):
        x = leaf(size, 8)
        assert_plain_gradients(lambda: model(x), [x, *model.parameters()], steps=1)  # noqa: B023


def test_a_step_that_leaves_out_layers_by_chance_is_plain() -> None:
    model, x = Stack(depth=6), leaf(4, 8)

    def run() -> Tensor:
        return model(x, run=lambda block, h: block(h) if torch.rand(()) < 0.6 else h)

    x_and_all = [x, *model.parameters()]
    for seed in range(10):
        plain = gradients(run, x_and_all, seed=seed)[1]
        with spilling():
            torch.manual_seed(seed)
            for t in x_and_all:
                t.grad = None
            out = run()
        out.sum().backward()
        assert all(same_bits(a, t.grad) for a, t in zip(plain, x_and_all, strict=True))


def test_evaluation_inside_and_between_is_plain() -> None:
    model, x = Stack(depth=3), leaf(4, 8)

    def run() -> Tensor:
        with torch.no_grad():
            scale = model(x).abs().mean()
        with torch.inference_mode():
            model(x)
        return model(x) * scale

    assert_plain_gradients(run, [x, *model.parameters()])


def test_a_graph_that_goes_on_after_a_backward_is_plain() -> None:
    """Truncated back-propagation that does not detach: steps share activations."""
    cell, x = nn.GRUCell(8, 8), torch.randn(6, 4, 8)

    def step(context: AbstractContextManager[Any]) -> list[Tensor]:
        h, found = torch.zeros(4, 8), []
        for row in x:
            with context:
                h = cell(row, h * 1.0)
                loss = padded(h).sum()
            found += torch.autograd.grad(loss, list(cell.parameters()), retain_graph=True)
        return found

    assert_as_plain(step)


def test_looking_at_saved_tensors_in_the_middle_of_a_forward_is_plain() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = padded(x)
        assert h.grad_fn is not None
        assert same_bits(h.grad_fn._saved_self.sin(), h)  # type: ignore[attr-defined]
        return padded(padded(h))

    assert_plain_gradients(run, [x])


def test_a_saved_tensor_can_be_looked_at_again_and_again() -> None:
    x = leaf(16)
    with spilling():
        h = x + 1
        expected = h.detach().clone()
        out = h.sin()
        del h
        rest = padded(padded(out))
    assert all(same_bits(out.grad_fn._saved_self, expected) for _ in range(3))  # type: ignore[union-attr]
    rest.sum().backward()
