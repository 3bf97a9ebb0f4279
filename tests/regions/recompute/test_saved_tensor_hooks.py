"""The user's own saved-tensor hooks, outside and inside a region."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import (
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)

import rekindle
from tests.toys import Block, assert_same_step, same_bits


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def three(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


class Counting(saved_tensors_hooks):
    """Hooks that count, and hold each tensor in a form of their own: a copy in another dtype."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def _pack(self, x: Tensor) -> tuple[torch.dtype, Tensor]:
        self.packed.append(x.detach().clone())
        return x.dtype, x.detach().double()

    def _unpack(self, held: tuple[torch.dtype, Tensor]) -> Tensor:
        self.unpacked += 1
        return held[1].to(held[0])


# Outside


def test_inputs_pass_through_hooks_set_outside_and_nothing_else_does() -> None:
    x = leaf(3)
    with Counting() as hooks:
        out = rekindle.checkpoint(three, x)
    assert [same_bits(t, x) for t in hooks.packed] == [True]
    out.sum().backward()
    assert hooks.unpacked == 1


@pytest.mark.parametrize(
    "pack",
    [lambda t: t, lambda t: t.clone(), lambda t: t.detach(), lambda t: t.detach().clone()],
    ids=["same", "clone", "detach", "detached clone"],
)
def test_a_hook_outside_may_hold_an_input_in_any_form(pack: Callable[[Tensor], Tensor]) -> None:
    """Autograd puts the graph back on what a hook unpacks; so must a region with its inputs."""
    x, w = leaf(3), leaf(3)

    def region(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin() * w

    def step() -> Tensor:
        with saved_tensors_hooks(pack, lambda t: t):
            return rekindle.checkpoint(region, x * 1.0, w)

    assert_same_step(lambda: region(x * 1.0, w), step, [x, w])


def test_inputs_in_containers_pass_through_hooks_set_outside() -> None:
    x, y = leaf(3), leaf(3)

    def region(tensors: dict[str, Any], extra: list[Tensor]) -> Tensor:
        return (tensors["a"][0].sin() * extra[0]).exp()

    with Counting() as hooks:
        out = rekindle.checkpoint(region, {"a": (x,)}, extra=[y])
    assert len(hooks.packed) == 2
    out.sum().backward()
    assert hooks.unpacked == 2


def test_integer_inputs_come_through_hooks_set_outside() -> None:
    table, index = leaf(5, 3), torch.tensor([1, 1, 4])

    def region(table: Tensor, index: Tensor) -> Tensor:
        return table[index].sin().sin()

    def step() -> Tensor:
        with Counting():
            return rekindle.checkpoint(region, table, index)

    assert_same_step(lambda: region(table, index), step, [table])


def test_a_region_under_save_on_cpu_trains_as_plain() -> None:
    model, x = Block(), leaf(2, 8)

    def step() -> Tensor:
        with save_on_cpu():
            return rekindle.checkpoint(model, x * 1.0)

    assert_same_step(lambda: model(x * 1.0), step, [x, *model.parameters()])


def test_an_argument_changed_before_the_call_is_right_under_hooks_that_copy() -> None:
    weight, x = leaf(4, 4), leaf(4, 4)

    def product(changed: Tensor) -> Tensor:
        return changed @ weight + changed.mT @ weight

    def step(run: Callable[..., Tensor]) -> Tensor:
        changed = (x * 1.0).add_(1.0)  # at version 1; what comes back from the hooks is at 0
        with Counting():
            return run(product, changed)

    assert_same_step(
        lambda: step(lambda function, changed: function(changed)),
        lambda: step(rekindle.checkpoint),
        [x, weight],
    )


def test_an_argument_changed_after_the_call_is_refused_under_hooks_that_give_it_back() -> None:
    weight, changed = leaf(4, 4), torch.randn(4, 4).add_(1.0)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        out = rekindle.checkpoint(lambda x: x @ weight, changed)
    changed.add_(1.0)
    with pytest.raises(rekindle.CheckpointError, match="modified by an inplace operation"):
        out.sum().backward()


def test_retain_graph_asks_the_hooks_outside_once_per_replay() -> None:
    x = leaf(3)
    with Counting() as hooks:
        loss = rekindle.checkpoint(three, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert hooks.unpacked == 2


def test_hooks_outside_do_not_see_what_the_replay_saves() -> None:
    x = leaf(3)
    with Counting() as hooks:
        loss = rekindle.checkpoint(three, x).sum()
        hooks.packed.clear()
        loss.backward()
    assert hooks.packed == []


def test_an_exception_from_a_hook_outside_leaves_no_region_open() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("no room")

    x = leaf(3)
    with saved_tensors_hooks(refuse, lambda t: t), pytest.raises(ValueError, match="no room"):
        rekindle.checkpoint(three, x)
    with Counting() as hooks:
        three(x)
    assert len(hooks.packed) == 3


# Inside


def test_hooks_inside_a_region_see_what_they_would_see_plain() -> None:
    x = leaf(3)

    def region(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        with Counting() as hooks:
            out = x.sin().exp()
        return out.cos().sin(), hooks.packed

    _, theirs = region(x)
    out, ours = rekindle.checkpoint(region, x)
    assert len(ours) == len(theirs) == 2
    assert all(map(same_bits, ours, theirs))
    out.sum().backward()


def test_hooks_inside_a_region_give_the_plain_gradients() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        hidden = x.cos()
        with Counting():
            hidden = hidden.sin().exp()
        return hidden.cos().sin()

    assert_same_step(lambda: region(x), lambda: rekindle.checkpoint(region, x), [x])


def test_save_on_cpu_inside_a_region_trains_as_plain() -> None:
    model, x = Block(), leaf(2, 8)

    def region(x: Tensor) -> Tensor:
        with save_on_cpu():
            hidden = model.norm(x)
        return x + model.mlp(hidden)

    assert_same_step(
        lambda: model(x), lambda: rekindle.checkpoint(region, x), [x, *model.parameters()]
    )


def test_a_region_whose_every_save_is_hooked_inside_needs_no_replay() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        with Counting():
            return three(x)

    with rekindle.observe() as seen:
        assert_same_step(lambda: three(x), lambda: rekindle.checkpoint(region, x), [x])
    assert (seen.total.activations_dropped, seen.total.replays) == (0, 0)


# From context_fn


def test_hooks_set_by_the_forward_context_hold_what_the_region_saves() -> None:
    x, hooks = leaf(3), Counting()

    def step() -> Tensor:
        return rekindle.checkpoint(three, x, context_fn=lambda: (hooks, nullcontext()))

    with rekindle.observe() as seen:
        assert_same_step(lambda: three(x), step, [x])
    assert (len(hooks.packed), hooks.unpacked) == (3, 3)
    assert seen.total.replays == 0


def test_hooks_set_by_the_replay_context_alone_are_an_error_that_says_what_is_missing() -> None:
    """They take from the replay what the forward gave to the region."""
    loss = rekindle.checkpoint(three, leaf(3), context_fn=lambda: (nullcontext(), Counting())).sum()
    with pytest.raises(rekindle.CheckpointError, match="saved 3 activations, the replay 0"):
        loss.backward()


# Hooks that are forbidden


def test_a_region_where_hooks_are_disabled_says_so() -> None:
    with (
        disable_saved_tensors_hooks("hooks are off in this part"),
        pytest.raises(RuntimeError, match="hooks are off in this part"),
    ):
        rekindle.checkpoint(three, leaf(3))


def test_a_region_refused_by_disabled_hooks_leaves_no_trace() -> None:
    x = leaf(3)
    with disable_saved_tensors_hooks("off"), pytest.raises(RuntimeError, match="off"):
        rekindle.checkpoint(three, x)
    with Counting() as hooks:
        three(x)
    assert len(hooks.packed) == 3
    with rekindle.observe() as seen:
        assert_same_step(lambda: three(x), lambda: rekindle.checkpoint(three, x), [x])
    assert (seen.total.forwards, seen.total.replays) == (1, 1)


def test_a_refused_region_is_not_counted_as_run() -> None:
    with (
        rekindle.observe() as seen,
        disable_saved_tensors_hooks("off"),
        pytest.raises(RuntimeError, match="off"),
    ):
        rekindle.checkpoint(three, leaf(3))
    assert (seen.total.forwards, seen.total.activations_held) == (0, 0)


def test_a_region_that_disables_hooks_inside_fails_and_leaves_no_trace() -> None:
    x = leaf(3)

    def region(x: Tensor) -> Tensor:
        with disable_saved_tensors_hooks("off inside"):
            return three(x)

    with pytest.raises(RuntimeError, match="off inside"):
        rekindle.checkpoint(region, x)
    with Counting() as hooks:
        three(x)
    assert len(hooks.packed) == 3


def test_a_region_without_gradients_runs_where_hooks_are_disabled() -> None:
    x = torch.randn(3)
    with disable_saved_tensors_hooks("off"), torch.no_grad():
        assert same_bits(rekindle.checkpoint(three, x), three(x))


def test_offload_inside_hooks_that_copy_refuses_a_change_as_autograd_does_without_them() -> None:
    """The innermost hooks count: the copies outside are not made, and the change is noticed."""
    x = torch.randn(4, 8, requires_grad=True)
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        accepted = x.exp()
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            refused = x.exp()
    plain = x.exp()
    for out in (accepted, refused, plain):
        out.mul_(2.0)
    accepted.sum().backward()
    for out in (refused, plain):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
