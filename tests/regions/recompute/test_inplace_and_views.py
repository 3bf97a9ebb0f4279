"""In-place ops and views: what plain autograd allows works, what it refuses is refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.toys import assert_same_step


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def inplace_activation(x: Tensor) -> Tensor:
    return nn.functional.relu(x * 2, inplace=True).sin()


def inplace_saved_result(x: Tensor) -> Tensor:
    return (x * 2).sigmoid_().cos().tanh_().sin().exp_()


def inplace_on_a_view(x: Tensor) -> Tensor:
    out = x.cos()
    out[1:].mul_(2)
    out[0] = x[1].sin()
    return out.cos().tanh()


def inplace_through_a_chain_of_views(x: Tensor) -> Tensor:
    out = x.sin()
    out.view(2, 2).t()[0].add_(x[:2].exp())
    return out.sin() * out.cos()


def inplace_on_a_detached_tensor(x: Tensor) -> Tensor:
    total = torch.zeros(4)
    total.add_(x.detach()).mul_(2)
    return (x * total).sin() * total.cos()


def inplace_into_a_buffer_made_inside(x: Tensor) -> Tensor:
    out = torch.zeros(2, 4)
    out[0] = x.sin()
    out[1] = x.exp()
    return out.cos().sin()


def views_only(x: Tensor) -> Tensor:
    a, b = x.view(2, 2).unbind(0)
    return (a * b.flip(0)).sin().expand(3, 2).exp()


def view_as_output(x: Tensor) -> Tensor:
    return x.exp().sin().view(2, 2)[:, 0]


@pytest.mark.parametrize(
    "region",
    [
        inplace_activation,
        inplace_saved_result,
        inplace_on_a_view,
        inplace_through_a_chain_of_views,
        inplace_on_a_detached_tensor,
        inplace_into_a_buffer_made_inside,
        views_only,
        view_as_output,
    ],
)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_region_gives_the_plain_gradients_with(
    region: Callable[[Tensor], Tensor], early_stop: bool
) -> None:
    x = leaf(4)
    assert_same_step(
        lambda: region(x), lambda: rekindle.checkpoint(region, x, early_stop=early_stop), [x]
    )


def test_a_view_as_argument_gives_the_plain_gradients() -> None:
    x = leaf(4)

    def region(view: Tensor) -> Tensor:
        return (view.sin() * view).exp()

    assert_same_step(lambda: region(x[1:]), lambda: rekindle.checkpoint(region, x[1:]), [x])


def test_an_output_changed_in_place_afterwards_gives_the_plain_gradients() -> None:
    x = leaf(4)

    def region(x: Tensor) -> Tensor:
        return x.sin().cos()

    assert_same_step(
        lambda: region(x).mul_(2).sin(), lambda: rekindle.checkpoint(region, x).mul_(2).sin(), [x]
    )


def test_a_view_output_changed_in_place_afterwards_gives_the_plain_gradients() -> None:
    x = leaf(4)

    def region(x: Tensor) -> Tensor:
        return x.sin().cos().view(2, 2)

    def step(out: Tensor) -> Tensor:
        out[0].mul_(2)
        return out.sin()

    assert_same_step(lambda: step(region(x)), lambda: step(rekindle.checkpoint(region, x)), [x])


# What cannot be replayed


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize(
    ("make_argument", "read"),
    [
        (lambda t: t, lambda a: a),
        (lambda t: [t], lambda a: a[0]),
        (lambda t: {"t": (t,)}, lambda a: a["t"][0]),
        (lambda t: t[1:], lambda a: a),
        (lambda t: Pair(t, t), lambda a: a.first),
    ],
    ids=["tensor", "list", "dict", "view", "named tuple"],
)
def test_an_argument_changed_inside_the_region_is_an_error_at_backward(
    make_argument: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    w, x = leaf(1), torch.randn(4)

    def region(argument: Any) -> Tensor:
        return (w * read(argument).add_(1)).sin()

    loss = rekindle.checkpoint(region, make_argument(x)).sum()
    with pytest.raises(rekindle.CheckpointError, match=r"argument .* was changed in place"):
        loss.backward()


def test_an_argument_with_gradient_changed_inside_the_region_is_an_error_at_backward() -> None:
    x = leaf(4)

    def region(hidden: Tensor) -> Tensor:
        return hidden.mul_(2).sin().exp()

    loss = rekindle.checkpoint(region, x * 1.0).sum()
    with pytest.raises(rekindle.CheckpointError, match="was changed in place") as error:
        loss.backward()
    assert "clone" in str(error.value)


@pytest.mark.parametrize("by", ["itself", "its base", "a view of it"])
def test_an_argument_changed_after_the_call_is_an_error_at_backward(by: str) -> None:
    w, base = leaf(3), torch.randn(4)
    argument = base[1:] if by == "its base" else base[:3]
    loss = rekindle.checkpoint(lambda x: (w * x).sin(), argument).sum()
    {"itself": argument, "its base": base, "a view of it": argument[0]}[by].add_(1)
    with pytest.raises(rekindle.CheckpointError, match=r"(?i)tensor argument 1 .*changed in place"):
        loss.backward()


def test_the_error_of_a_changed_argument_counts_tensors_from_one() -> None:
    w, a, b = leaf(3), torch.randn(3), torch.randn(3)
    loss = rekindle.checkpoint(lambda flag, a, b: (w * a).sin() * b, True, a, b=b).sum()
    b.add_(1)
    with pytest.raises(rekindle.CheckpointError, match=r"(?i)tensor argument 2 "):
        loss.backward()


def test_an_argument_changed_between_two_backwards_is_an_error_at_the_second() -> None:
    w, x = leaf(3), torch.randn(3)
    loss = rekindle.checkpoint(lambda x: (w * x).sin(), x).sum()
    loss.backward(retain_graph=True)
    x.add_(1)
    with pytest.raises(rekindle.CheckpointError, match="was changed in place"):
        loss.backward()


def test_a_changed_argument_of_a_region_that_saved_nothing_is_no_error() -> None:
    x = leaf(3)

    def region(hidden: Tensor) -> Tensor:
        return hidden.add_(1) * 2

    assert_same_step(lambda: region(x * 1.0), lambda: rekindle.checkpoint(region, x * 1.0), [x])


def test_a_tensor_in_the_closure_changed_after_the_call_is_refused_as_plain_autograd_does() -> None:
    x, scale = leaf(3), torch.randn(3)

    def region(x: Tensor) -> Tensor:
        return (x * scale).sin()

    for run in (lambda f, x: f(x), rekindle.checkpoint):
        loss = run(region, x).sum()
        scale.add_(1)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            loss.backward()


def test_a_parameter_updated_before_backward_is_refused_as_plain_autograd_does() -> None:
    """A stale graph: two losses, a step on the first, then the backward of the second."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for run in (lambda f, x: f(x), rekindle.checkpoint):
        stale = run(model, x).sum()
        run(model, x).pow(2).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"in.?place"):
            stale.backward()


def test_an_argument_changed_inside_a_nested_region_is_an_error_at_backward() -> None:
    x = leaf(3)

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(lambda h: h.mul_(2).sin().exp(), x.exp())

    loss = rekindle.checkpoint(outer, x).sum()
    with pytest.raises(rekindle.CheckpointError, match="was changed in place"):
        loss.backward()


def writes_after_sin_saved_its_input(x: Tensor) -> Tensor:
    hidden = x.exp()
    out = hidden.sin()
    hidden.add_(1)
    return out.cos()


def writes_after_exp_saved_its_result(x: Tensor) -> Tensor:
    return x.exp().add_(1).cos()


def writes_through_a_view(x: Tensor) -> Tensor:
    hidden = x.sin()
    out = hidden.cos()
    hidden[0] = 0.0
    return out.sin()


@pytest.mark.parametrize(
    "region",
    [
        writes_after_sin_saved_its_input,
        writes_after_exp_saved_its_result,
        writes_through_a_view,
    ],
)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_what_plain_autograd_refuses_is_refused(
    region: Callable[[Tensor], Tensor], retain_graph: bool
) -> None:
    x = leaf(4)
    for loss in (region(x).sum(), rekindle.checkpoint(region, x).sum()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=retain_graph)


def test_the_error_of_a_modified_activation_names_the_op_and_its_line() -> None:
    loss = rekindle.checkpoint(writes_after_sin_saved_its_input, leaf(4)).sum()
    with pytest.raises(rekindle.CheckpointError) as error:
        loss.backward()
    assert "hidden.sin()" in str(error.value)
    assert "test_inplace_and_views.py" in str(error.value)
    assert "is at version 1; expected version 0" in str(error.value)


def test_a_modified_activation_that_backward_does_not_need_is_no_error() -> None:
    x, y = leaf(4), leaf(4)

    def region(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y.sin().cos(), writes_after_sin_saved_its_input(x)

    out, _ = rekindle.checkpoint(region, x, y)
    (grad,) = torch.autograd.grad(out.sum(), y)
    (plain,) = torch.autograd.grad(y.sin().cos().sum(), y)
    assert torch.equal(grad, plain)
