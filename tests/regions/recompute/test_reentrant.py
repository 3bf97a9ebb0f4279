"""The reentrant variant: one node without a graph in forward, and what it cannot do."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from tests.toys import Block, Mlp, assert_same_step, gradients, same_bits


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def three(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def reentrant(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return rekindle.checkpoint(function, *args, use_reentrant=True, **options)


def test_a_reentrant_region_trains_as_plain() -> None:
    model, x = Block(drop=0.3), leaf(2, 8)
    assert_same_step(lambda: model(x), lambda: reentrant(model, x), [x, *model.parameters()])


def test_checkpoint_function_is_the_same_as_use_reentrant() -> None:
    model, x = Block(drop=0.3), leaf(2, 8)
    assert_same_step(
        lambda: reentrant(model, x),
        lambda: rekindle.CheckpointFunction.apply(model, True, x),
        [x, *model.parameters()],
    )


def test_the_region_is_one_node_of_the_graph() -> None:
    out = reentrant(three, leaf(3))
    assert type(out.grad_fn).__name__ == "CheckpointFunctionBackward"


def test_the_decorator_form_may_be_reentrant() -> None:
    x = leaf(3)
    region = rekindle.checkpoint(use_reentrant=True)(three)
    assert type(region(x).grad_fn).__name__ == "CheckpointFunctionBackward"


def test_non_tensor_arguments_and_outputs_work() -> None:
    x, y = leaf(3), leaf(3)

    def region(x: Tensor, power: int, none: None, y: Tensor) -> tuple[Tensor, None, str, Tensor]:
        assert none is None
        return (x**power).sin() * y, None, "text", y.exp()

    assert_same_step(
        lambda: region(x, 2, None, y), lambda: reentrant(region, x, 2, None, y), [x, y]
    )


def test_only_some_inputs_may_want_gradients() -> None:
    x, frozen = leaf(3), torch.randn(3)

    def region(x: Tensor, frozen: Tensor) -> Tensor:
        return (x * frozen).sin()

    assert_same_step(lambda: region(x, frozen), lambda: reentrant(region, x, frozen), [x])


def test_only_some_outputs_may_be_used() -> None:
    x = leaf(3)

    def region(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp(), x.cos().exp()

    assert_same_step(lambda: region(x)[1], lambda: reentrant(region, x)[1], [x])


def test_backward_twice_with_retain_graph_adds_up_as_plain() -> None:
    x = leaf(3)

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same_step(lambda: three(x), lambda: reentrant(three, x), [x], backward=twice)


def test_forward_holds_the_input_alone_and_backward_nothing() -> None:
    storages: list[StorageWeakRef] = []

    def region(x: Tensor) -> Tensor:
        hidden = x.exp()
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden.cos()

    x = leaf(3)
    loss = reentrant(region, x).sum()
    assert [s.expired() for s in storages] == [True]
    loss.backward()
    assert [s.expired() for s in storages] == [True, True]


def test_a_region_without_gradients_runs_plainly() -> None:
    x = leaf(3)
    with rekindle.observe() as seen, torch.no_grad():
        assert same_bits(reentrant(three, x), three(x))
    assert seen.regions == {}


def test_it_is_counted_and_replays_every_op() -> None:
    x = leaf(8)
    with rekindle.observe() as seen:
        reentrant(lambda x: x.sin().cos().sin(), x).sum().backward()
    assert seen.total == rekindle.Counts(
        forwards=1, replays=1, ops_replayed=3, activations_held=1, bytes_held=32
    )


def test_is_recomputing_is_true_in_its_replay_alone() -> None:
    x, flags = leaf(3), []

    def region(x: Tensor) -> Tensor:
        flags.append(rekindle.is_recomputing())
        return three(x)

    reentrant(region, x).sum().backward()
    assert flags == [False, True]
    assert not rekindle.is_recomputing()


# Random numbers, buffers, autocast


def test_dropout_draws_the_same_mask_in_replay() -> None:
    x = leaf(64)
    assert_same_step(
        lambda: nn.functional.dropout(x.sin(), 0.5),
        lambda: reentrant(lambda x: nn.functional.dropout(x.sin(), 0.5), x),
        [x],
    )


def test_without_preserve_rng_state_the_replay_draws_on() -> None:
    drawn: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        drawn.append(torch.rand(8))
        return three(x)

    reentrant(region, leaf(3), preserve_rng_state=False).sum().backward()
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_statistics_end_a_step_as_plain(training: bool) -> None:
    x = leaf(6, 4)
    norms = [nn.BatchNorm1d(4).train(training) for _ in range(2)]
    _, plain, _ = gradients(lambda: norms[0](x.sin()).sin(), [x, *norms[0].parameters()])
    _, ours, _ = gradients(
        lambda: reentrant(lambda x: norms[1](x.sin()).sin(), x), [x, *norms[1].parameters()]
    )
    assert all(map(same_bits, plain, ours))
    for a, b in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_module_switched_to_eval_before_backward_is_replayed_in_training() -> None:
    model, x = Mlp(drop=0.5), leaf(2, 8)

    def step(run: Callable[..., Tensor]) -> Tensor:
        model.train()
        out = run(model, x)
        model.eval()
        return out

    leaves = [x, *model.parameters()]
    assert_same_step(lambda: step(lambda f, x: f(x)), lambda: step(reentrant), leaves)


def test_autocast_is_the_same_in_replay() -> None:
    model, x = Mlp(), leaf(2, 8)

    def step(run: Callable[..., Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(model, x)

    leaves = [x, *model.parameters()]
    assert_same_step(lambda: step(lambda f, x: f(x)), lambda: step(reentrant), leaves)


def test_an_exception_in_replay_puts_everything_back() -> None:
    x, model = leaf(6, 4), nn.BatchNorm1d(4)

    def region(x: Tensor) -> Tensor:
        out = model(x)
        torch.rand(3)
        if rekindle.is_recomputing():
            raise ValueError("replay")
        return out

    loss = reentrant(region, x).sum()
    model.eval()
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="replay"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert model.num_batches_tracked == 1
    assert not rekindle.is_recomputing()


# What it cannot do


def test_autograd_grad_is_an_error_that_names_the_cure() -> None:
    x = leaf(3)
    loss = reentrant(three, x).sum()
    with pytest.raises(RuntimeError, match=r"autograd\.grad\(\).*use_reentrant=False"):
        torch.autograd.grad(loss, x)


def test_backward_with_inputs_is_an_error_that_names_the_cure() -> None:
    x = leaf(3)
    loss = reentrant(three, x).sum()
    with pytest.raises(RuntimeError, match=r"backward\(inputs=\.\.\.\).*use_reentrant=False"):
        loss.backward(inputs=[x])


def test_inputs_without_gradient_warn_and_give_no_gradient() -> None:
    """Field note 16, where the reentrant variant cannot help: it says so."""
    model, x = Mlp(), torch.randn(2, 8)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        out = reentrant(model, x)
    assert not out.requires_grad


def test_a_region_whose_outputs_need_no_gradient_is_an_error_at_backward() -> None:
    loss = reentrant(lambda x: x.detach().sin(), leaf(3)).sum()
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        loss.backward()


def test_an_argument_changed_after_the_call_is_an_error_at_backward() -> None:
    x = leaf(3)
    hidden = x * 2
    loss = reentrant(three, hidden).sum()
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The helpers


def test_detach_variable_cuts_tensors_off_and_keeps_what_they_want() -> None:
    x, frozen = leaf(3) * 2, torch.randn(3)
    a, b, c = rekindle.detach_variable((x, frozen, "text"))
    assert (a.is_leaf, a.requires_grad, same_bits(a, x)) == (True, True, True)
    assert (b.is_leaf, b.requires_grad, c) == (True, False, "text")


def test_detach_variable_takes_a_tuple_only() -> None:
    with pytest.raises(RuntimeError, match=r"tuple of tensors.* list"):
        rekindle.detach_variable([leaf(3)])  # type: ignore[arg-type]


def test_check_backward_validity_warns_if_no_input_wants_a_gradient() -> None:
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        rekindle.check_backward_validity([torch.ones(1), 3])


def test_check_backward_validity_is_silent_if_one_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rekindle.check_backward_validity([3, torch.ones(1), leaf(1)])
