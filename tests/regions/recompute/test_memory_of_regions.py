"""What regions hold between forward and backward, and that nothing of it stays."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from rekindle.regions.recompute.recompute_region import RecomputeRegion
from rekindle.regions.recompute.slots import Slot
from tests.regions.recompute.living import Storages, count, five, leaf
from tests.toys import Mlp


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """And what lived before a test is no concern of it."""
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.enable()


def wide(x: Tensor) -> Tensor:
    """Its activations are twice as large as its input and output."""
    return torch.cat([x, x]).sin().exp()[: x.numel()].cos()


# After forward


def test_after_forward_a_region_holds_its_input_and_no_activation() -> None:
    x = leaf(8)
    with Storages() as storages:
        hidden = x * 2  # 32 bytes
        out = rekindle.checkpoint(wide, hidden)
        del hidden
        assert storages.alive() == [32, 32]  # the input, and the output that we hold
    assert out.shape == (8,)


def test_after_forward_a_chain_of_regions_holds_one_input_each() -> None:
    x = leaf(8)
    with Storages() as storages:
        out = x * 2
        for _ in range(4):
            out = rekindle.checkpoint(wide, out)
        assert storages.alive() == [32] * 5
        del out
        assert storages.alive() == []


def test_after_forward_nested_regions_hold_the_outermost_input_alone() -> None:
    x = leaf(8)

    def outer(x: Tensor) -> Tensor:
        for _ in range(3):
            x = rekindle.checkpoint(five, x)
        return x

    with Storages() as storages:
        out = rekindle.checkpoint(outer, x * 2)
        assert storages.alive() == [32, 32]
    assert out.shape == (8,)


def test_an_output_that_nobody_keeps_is_let_go_after_forward() -> None:
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(lambda x: (five(x), wide(x)), x * 2)[0]
        assert storages.alive() == [32, 32]
    assert out.shape == (8,)


def test_a_region_whose_output_is_reduced_holds_its_input_alone() -> None:
    x = leaf(8)
    with Storages() as storages:
        loss = rekindle.checkpoint(five, x * 2).sum()
        assert storages.alive() == [4, 32]
    assert loss.shape == ()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_region_without_gradients_holds_nothing(mode: Callable[[], Any]) -> None:
    x = leaf(8)
    with mode(), Storages() as storages:
        out = rekindle.checkpoint(five, x * 2)
        assert storages.alive() == [32]  # what we hold ourselves
        assert count(RecomputeRegion) == 0
    assert out.shape == (8,)


def test_a_region_that_saves_nothing_holds_nothing() -> None:
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(lambda x: x + 1, x * 2)
        assert storages.alive() == [32]
        assert count(RecomputeRegion) == 0
    assert out.shape == (8,)


def test_parameters_are_never_stored() -> None:
    """Field note 31: a replay finds parameters where they are, and holds none after it."""
    model, x = Mlp(), leaf(2, 8)
    loss = rekindle.checkpoint(model, x).sum()
    weights = [weakref.ref(p) for p in model.parameters()]
    storages = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    loss.backward()
    del model, loss
    assert [w() for w in weights] == [None] * 4
    assert all(s.expired() for s in storages)


# After backward


def test_after_backward_nothing_is_left() -> None:
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(five, x * 2)
        loss = out.sum()
        loss.backward()
        del out
        assert storages.alive() == [4, 32]  # the loss, and x.grad
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_after_backward_with_retain_graph_nothing_replayed_is_left() -> None:
    x = leaf(8)
    with Storages() as storages:
        loss = rekindle.checkpoint(five, x * 2).sum()
        loss.backward(retain_graph=True)
        assert storages.alive() == [4, 32, 32]  # the loss, x.grad, and the region's input
        loss.backward(retain_graph=True)
        assert storages.alive() == [4, 32, 32]


def test_after_double_backward_nothing_is_left() -> None:
    x = leaf(8)
    with Storages() as storages:
        loss = rekindle.checkpoint(five, x * 2).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        del loss, grad
        assert storages.alive() == [32]
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)
    assert second.shape == (8,)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_after_backward_for_chosen_inputs_nothing_replayed_is_left(retain_graph: bool) -> None:
    """The second branch is not run by this backward; what was replayed for it is let go."""
    x, y = leaf(8), leaf(8)
    with Storages() as storages:
        loss = rekindle.checkpoint(lambda x, y: five(x) * five(y), x * 2, y * 2).sum()
        loss.backward(inputs=[x], retain_graph=retain_graph)
        assert storages.alive() == [4, 32, 32, 32]  # the loss, x.grad, and the two inputs


def test_after_autograd_grad_of_some_inputs_nothing_replayed_is_left() -> None:
    x, y = leaf(8), leaf(8)
    with Storages() as storages:
        loss = rekindle.checkpoint(lambda x, y: five(x) * five(y), x * 2, y * 2).sum()
        (grad,) = torch.autograd.grad(loss, [y], retain_graph=True)
        del grad
        assert storages.alive() == [4, 32, 32]


def test_after_backward_of_one_of_two_outputs_nothing_replayed_is_left() -> None:
    x, y = leaf(8), leaf(8)
    with Storages() as storages:
        a, b = rekindle.checkpoint(lambda x, y: (five(x), five(y)), x * 2, y * 2)
        a.sum().backward()
        del a
        assert storages.alive() == [32, 32, 32, 32]  # b, x.grad, and the two inputs
    assert b.shape == (8,)


def test_after_reading_a_saved_tensor_nothing_replayed_is_left() -> None:
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(five, x * 2)
        read = out.grad_fn._saved_self
        del read
        assert storages.alive() == [32, 32]


def test_an_activation_is_freed_as_soon_as_its_node_has_run() -> None:
    """In the middle of a backward as much is alive as in the middle of a plain one."""

    def alive_after_its_last_ops(run: Callable[..., Tensor]) -> list[int]:
        x, alive = leaf(8), []
        with Storages() as storages:

            def region(x: Tensor) -> Tensor:
                x = five(x)
                x.register_hook(lambda grad: alive.extend(storages.alive()))
                return five(x)

            run(region, x * 2).sum().backward()
        return alive

    assert alive_after_its_last_ops(rekindle.checkpoint) == alive_after_its_last_ops(
        lambda region, x: region(x)
    )


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "region",
    [
        five,
        lambda x: nn.functional.dropout(five(x), 0.5),
        lambda x: nn.functional.rrelu(five(x), training=True),
        lambda x: five(x) * 2 + 1,
    ],
    ids=["five", "dropout last", "rrelu last", "unsaved last"],
)
def test_steps_leave_nothing_behind_wherever_their_replays_end(
    region: Callable[[Tensor], Tensor], early_stop: bool
) -> None:
    """A leak here is for good: the collector does not see through autograd's nodes."""
    x = leaf(8)
    with Storages() as storages:
        for _ in range(3):
            rekindle.checkpoint(region, x * 2, early_stop=early_stop).sum().backward()
        x.grad = None
        assert storages.alive() == []


@pytest.mark.parametrize("option", [{"debug": True}, {"determinism_check": "values"}])
def test_steps_with_checks_leave_nothing_behind(option: dict[str, Any]) -> None:
    x = leaf(8)
    with Storages() as storages:
        rekindle.checkpoint(five, x * 2, **option).sum().backward()
        x.grad = None
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


# When things die early


def test_outputs_that_die_without_backward_free_everything() -> None:
    """Field note 29: no reference cycle keeps activations alive once outputs die."""
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(five, x * 2)
        del out
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_nested_outputs_that_die_without_backward_free_everything() -> None:
    """Field note 29, nested."""
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(lambda x: rekindle.checkpoint(five, five(x)), x * 2)
        del out
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_outputs_that_die_after_an_argument_was_changed_inside_free_everything() -> None:
    """The argument becomes part of the region's own graph: to hold it would be a cycle."""
    x = leaf(8)
    with Storages() as storages:
        out = rekindle.checkpoint(lambda h: five(h.mul_(3)), x * 2)
        del out
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


@pytest.mark.parametrize("container", [lambda h: [h], lambda h: {"h": h}])
def test_outputs_put_into_an_argument_free_everything(container: Callable[[Tensor], Any]) -> None:
    """A region that writes its output into a list or dict it was given makes no cycle."""
    x = leaf(8)

    def region(tensors: Any) -> Tensor:
        key = 0 if isinstance(tensors, list) else "h"
        tensors[key] = five(tensors[key])
        return tensors[key]

    with Storages() as storages:
        argument = container(x * 2)
        out = rekindle.checkpoint(region, argument)
        del out, argument
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)


def test_reading_a_batch_norm_in_a_region_leaves_no_copies_behind() -> None:
    norm, x = nn.BatchNorm1d(4), leaf(3, 4)
    out = rekindle.checkpoint(lambda x: norm(x).sin(), x)
    with Storages() as storages:
        out.sum().backward()
        for thing in (x, *norm.parameters()):
            thing.grad = None
        del out
        assert storages.alive() == []
    assert (count(RecomputeRegion), count(Slot)) == (0, 0)
