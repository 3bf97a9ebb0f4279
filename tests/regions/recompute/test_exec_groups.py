"""Several backward calls over parts of one graph replay a region once, under an exec group."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from tests.toys import Mlp, same_bits


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def branches(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs over disjoint parts of the graph."""
    return x.sin().exp().cos(), w.sin().exp().cos()


def both_gradients(
    run: Callable[..., tuple[Tensor, Tensor]], x: Tensor, w: Tensor, retain_graph: bool = False
) -> list[Tensor]:
    """The gradients of the two branches in two calls."""
    a, b = run(branches, x, w)
    loss = a.sum() + b.sum()
    grads = [*torch.autograd.grad(loss, [x], retain_graph=True)]
    grads += torch.autograd.grad(loss, [w], retain_graph=retain_graph)
    return grads


def test_two_calls_for_different_inputs_replay_twice_without_a_group() -> None:
    x, w = leaf(3), leaf(3)
    with rekindle.observe() as seen:
        both_gradients(rekindle.checkpoint, x, w)
    assert seen.total.replays == 2


@pytest.mark.parametrize("retain_graph", [False, True])
def test_two_calls_over_disjoint_parts_replay_once_in_a_group(retain_graph: bool) -> None:
    """Field note 27."""
    x, w = leaf(3), leaf(3)
    with rekindle.observe() as seen, rekindle.GraphExecGroup():
        grads = both_gradients(rekindle.checkpoint, x, w, retain_graph)
    assert seen.total.replays == 1
    plain = both_gradients(lambda f, *a: f(*a), x, w)
    assert all(map(same_bits, grads, plain))


def test_backward_calls_of_two_outputs_replay_once_in_a_group() -> None:
    x, w = leaf(3), leaf(3)
    a, b = rekindle.checkpoint(branches, x, w)
    with rekindle.observe() as seen, rekindle.GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert seen.total.replays == 1


def test_input_gradients_then_weight_gradients_of_a_stage_replay_once_in_a_group() -> None:
    """Field note 27: what a zero-bubble pipeline does; both calls run the stage's matmul nodes."""
    stage, x = Mlp(), leaf(2, 8)
    weights = list(stage.parameters())

    def split(out: Tensor) -> list[Tensor]:
        of_input = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        return [*of_input, *torch.autograd.grad(out.sum(), weights)]

    with rekindle.observe() as seen, rekindle.GraphExecGroup():
        ours = split(rekindle.checkpoint(stage, x))
    assert all(map(same_bits, ours, split(stage(x))))
    assert seen.total.replays == 1


def test_a_chain_of_regions_replays_each_once_in_a_group() -> None:
    """Field note 27, several regions and several calls, one weight at a time."""
    stages, x = nn.ModuleList(Mlp() for _ in range(3)), leaf(2, 8)
    weights = list(stages.parameters())

    def split(run: Callable[..., Tensor]) -> list[Tensor]:
        out = x
        for stage in stages:
            out = run(stage, out)
        return [torch.autograd.grad(out.sum(), w, retain_graph=True)[0] for w in [x, *weights]]

    with rekindle.observe() as seen, rekindle.GraphExecGroup():
        ours = split(rekindle.checkpoint)
    assert all(map(same_bits, ours, split(lambda f, x: f(x))))
    assert seen.total.replays == 3


def test_nested_regions_replay_once_each_in_a_group() -> None:
    x, w = leaf(3), leaf(3)

    def outer(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rekindle.checkpoint(branches, x.exp(), w.exp())

    a, b = rekindle.checkpoint(outer, x, w)
    with rekindle.observe() as seen, rekindle.GraphExecGroup():
        ours = torch.autograd.grad(a.sum() + b.sum(), [x], retain_graph=True)
        ours += torch.autograd.grad(a.sum() + b.sum(), [w])
    a, b = branches(x.exp(), w.exp())
    assert all(map(same_bits, ours, torch.autograd.grad(a.sum() + b.sum(), [x, w])))
    assert seen.total.replays == 2


def test_another_group_replays_again() -> None:
    x, w = leaf(3), leaf(3)
    a, b = rekindle.checkpoint(branches, x, w)
    with rekindle.observe() as seen:
        with rekindle.GraphExecGroup():
            torch.autograd.grad(a.sum(), [x], retain_graph=True)
        with rekindle.GraphExecGroup():
            torch.autograd.grad(b.sum(), [w], retain_graph=True)
    assert seen.total.replays == 2


def test_leaving_a_group_lets_go_of_what_was_replayed() -> None:
    replayed: list[StorageWeakRef] = []

    def region(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.exp(), w.exp()
        if rekindle.is_recomputing():
            replayed.extend(StorageWeakRef(h.untyped_storage()) for h in hidden)
        return hidden[0].cos(), hidden[1].cos()

    x, w = leaf(3), leaf(3)
    a, b = rekindle.checkpoint(region, x, w)
    loss = a.sum() + b.sum()
    with rekindle.GraphExecGroup():
        torch.autograd.grad(loss, [x], retain_graph=True)
        assert [storage.expired() for storage in replayed][1:] == [False]  # kept for the next call
    assert [storage.expired() for storage in replayed] == [True, True]
    assert loss.requires_grad


def test_a_group_inside_a_group_is_an_error_that_leaves_the_outer_one() -> None:
    with rekindle.GraphExecGroup() as outer:
        with pytest.raises(RuntimeError, match="cannot be nested"), rekindle.GraphExecGroup():
            pass
        assert rekindle.GraphExecGroup._get_current_group() is outer
    assert rekindle.GraphExecGroup._get_current_group() is None


def test_an_exception_leaves_the_group() -> None:
    with pytest.raises(ValueError, match="inside"), rekindle.GraphExecGroup():
        raise ValueError("inside")
    assert rekindle.GraphExecGroup._get_current_group() is None


def test_a_group_can_be_entered_again_after_it_was_left() -> None:
    group = rekindle.GraphExecGroup()
    for _ in range(2):
        with group:
            assert rekindle.GraphExecGroup._get_current_group() is group


def test_gradients_for_all_at_once_are_the_plain_ones_in_a_group() -> None:
    stage, x = Mlp(), leaf(2, 8)
    leaves = [x, *stage.parameters()]
    with rekindle.GraphExecGroup():
        ours = torch.autograd.grad(rekindle.checkpoint(stage, x).sum(), leaves)
    assert all(map(same_bits, ours, torch.autograd.grad(stage(x).sum(), leaves)))
