"""A mismatch: the error says where, what, why, and what to try next (field note 1)."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle


class Settings:
    """What regions read behind our back."""

    width = 8
    deep = False
    flipped = False


SETTINGS = Settings()


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    yield
    vars(SETTINGS).clear()


def line_of(function: Any, text: str) -> str:
    """`file:line` of the line of a function that holds this text."""
    source, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(source) if text in line)
    return f"test_messages.py:{first + offset}"


def error_of(y: Tensor) -> str:
    with pytest.raises(rekindle.CheckpointError) as caught:
        y.sum().backward()
    return str(caught.value)


def narrowed(x: Tensor) -> Tensor:
    y = x[:, : SETTINGS.width].exp()
    return y.sin()


def test_a_global_that_changes_a_shape_is_explained(x: Tensor) -> None:
    y = rekindle.checkpoint(narrowed, x)
    SETTINGS.width = 4
    text = error_of(y)
    assert "Region narrowed" in text
    assert "x[:, : SETTINGS.width].exp()" in text
    assert text.count(line_of(narrowed, ".exp()")) == 2
    assert "float32[4, 8] cpu" in text
    assert "float32[4, 4] cpu" in text
    assert "Likely cause: a shape" in text
    assert "Try:" in text


def branching(x: Tensor) -> Tensor:
    if SETTINGS.deep:
        x = x.exp()
        x = x.tanh()
    return x.sin()


def test_a_branch_that_saves_more_is_explained(x: Tensor) -> None:
    """The forward saves sin's input, the replay exp's output, which looks the same; then more."""

    def region(x: Tensor) -> Tensor:
        x = branching(x)
        return x.reshape(-1)[:3].cos()

    y = rekindle.checkpoint(region, x)
    SETTINGS.deep = True
    text = error_of(y)
    assert "region did not replay as it ran" in text
    assert line_of(branching, "x.sin()") in text
    assert line_of(branching, "x.exp()") in text
    assert "another path" in text
    assert "Try:" in text


def test_a_branch_that_saves_more_at_the_end_is_explained(x: Tensor) -> None:
    """Only the count differs: the replay runs to its end and saves what the forward did not."""

    def region(x: Tensor) -> Tensor:
        x = x.sin()
        return x.exp() if SETTINGS.deep else x

    y = rekindle.checkpoint(region, x, early_stop=False)
    SETTINGS.deep = True
    text = error_of(y)
    assert "the forward saved 1 activations, the replay more" in text
    assert "x.exp()" in text
    assert line_of(region, "x.exp()") in text
    assert "another path" in text


def test_a_branch_that_saves_fewer_is_explained(x: Tensor) -> None:
    SETTINGS.deep = True
    y = rekindle.checkpoint(branching, x)
    SETTINGS.deep = False
    text = error_of(y)
    assert "Region branching" in text
    assert "the forward saved 3 activations, the replay 1" in text
    assert "x.tanh()" in text
    assert line_of(branching, "x.tanh()") in text
    assert "another path" in text


def cast(x: Tensor) -> Tensor:
    y = x.to(torch.float64 if SETTINGS.flipped else torch.float32)
    return y.sin()


def test_another_dtype_is_explained(x: Tensor) -> None:
    y = rekindle.checkpoint(cast, x)
    SETTINGS.flipped = True
    text = error_of(y)
    assert "float32[4, 8] cpu" in text
    assert "float64[4, 8] cpu" in text
    assert text.count(line_of(cast, "y.sin()")) == 2
    assert "a dtype from outside" in text


def moved(x: Tensor) -> Tensor:
    y = x.to("meta" if SETTINGS.flipped else "cpu") * 2
    return y.sin()


def test_another_device_is_explained(x: Tensor) -> None:
    y = rekindle.checkpoint(moved, x)
    SETTINGS.flipped = True
    text = error_of(y)
    assert "float32[4, 8] cpu" in text
    assert "float32[4, 8] meta" in text
    assert "a device that the region takes from outside" in text


def test_a_parameter_that_is_frozen_between_forward_and_backward_is_explained(x: Tensor) -> None:
    layer = nn.Linear(8, 8)
    y = rekindle.checkpoint(lambda x: layer(x.exp()).sin(), x)
    layer.weight.requires_grad_(False)
    text = error_of(y)
    assert "requires_grad" in text
    assert "layer(x.exp())" in text
    assert "F.linear(input, self.weight, self.bias)" in text
    assert "test_messages.py:" in text


def test_a_parameter_that_is_unfrozen_between_forward_and_backward_is_explained(
    x: Tensor,
) -> None:
    layer = nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    y = rekindle.checkpoint(lambda x: layer(x.exp()).sin(), x)
    layer.weight.requires_grad_(True)
    text = error_of(y)
    assert "requires_grad" in text
    assert "layer(x.exp())" in text


def test_a_parameter_that_was_resized_is_explained(x: Tensor) -> None:
    bias = nn.Parameter(torch.randn(8))
    y = rekindle.checkpoint(lambda x: (x.exp() * bias).sin(), x)
    bias.data = torch.randn(1)
    text = error_of(y)
    assert "float32[8] cpu" in text
    assert "float32[1] cpu" in text
    assert "resized" in text


def test_the_error_is_the_one_class_and_a_runtime_error(x: Tensor) -> None:
    y = rekindle.checkpoint(narrowed, x)
    SETTINGS.width = 4
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    assert type(caught.value) is rekindle.CheckpointError


def test_the_error_points_to_debug_where_it_would_help(x: Tensor) -> None:
    y = rekindle.checkpoint(narrowed, x)
    SETTINGS.width = 4
    assert "debug=True" in error_of(y)


def test_the_error_names_a_module_by_its_class(x: Tensor) -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return narrowed(x)

    y = rekindle.checkpoint(Narrow(), x)
    SETTINGS.width = 4
    assert "Region Narrow " in error_of(y)


def test_the_error_shows_the_users_line_for_an_op_inside_torchs_python(x: Tensor) -> None:
    norm = nn.LayerNorm(8)

    def region(x: Tensor) -> Tensor:
        y = norm(x.exp().repeat(2 if SETTINGS.flipped else 1, 1))
        return y.sin()

    y = rekindle.checkpoint(region, x)
    SETTINGS.flipped = True
    text = error_of(y)
    assert line_of(region, "norm(") in text
    assert "site-packages" not in text


def test_without_preserve_rng_state_the_error_names_it_as_a_cause(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        keep = torch.rand(64) < 0.5
        return x.repeat(8, 2)[:, :8].reshape(-1)[:64][keep].exp().sin()

    torch.manual_seed(0)
    y = rekindle.checkpoint(region, x, preserve_rng_state=False)
    assert "preserve_rng_state=False" in error_of(y)


def test_a_mismatch_in_an_inner_region_names_the_inner_region(x: Tensor) -> None:

    def summed(x: Tensor) -> Tensor:
        return narrowed(x).sum()

    def outer(x: Tensor) -> Tensor:
        return rekindle.checkpoint(summed, x.cos()).sin()

    y = rekindle.checkpoint(outer, x)
    SETTINGS.width = 4
    assert "summed did not replay" in error_of(y)


def test_a_mismatch_in_the_first_of_two_backwards_is_found_in_the_second(x: Tensor) -> None:
    y = rekindle.checkpoint(narrowed, x).sum()
    y.backward(retain_graph=True)
    SETTINGS.width = 4
    with pytest.raises(rekindle.CheckpointError):
        y.backward()


def test_the_right_gradient_comes_after_the_cause_is_mended(x: Tensor) -> None:
    y = rekindle.checkpoint(narrowed, x).sum()
    SETTINGS.width = 4
    with pytest.raises(rekindle.CheckpointError):
        y.backward(retain_graph=True)
    SETTINGS.width = 8
    y.backward()
    (expected,) = torch.autograd.grad(narrowed(x).sum(), x)
    assert torch.equal(x.grad, expected)


def test_determinism_check_none_does_not_look_at_shapes(x: Tensor) -> None:
    """The replay gives back another shape that happens to broadcast: nobody asked for a check."""

    def region(x: Tensor) -> Tensor:
        scale = torch.full((SETTINGS.width,), 2.0)
        return (x.exp() * scale).sum()

    y = rekindle.checkpoint(region, x, determinism_check="none")
    SETTINGS.width = 1
    y.backward()
    assert torch.equal(x.grad, 2 * x.exp())


def test_an_argument_changed_in_place_by_the_region_is_explained(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        return x.mul_(2).exp().sin()

    y = rekindle.checkpoint(region, x.clone())
    text = error_of(y)
    assert "argument 1" in text
    assert "changed in place" in text
    assert "clone()" in text


def test_an_argument_changed_in_place_after_the_region_is_explained(x: Tensor) -> None:
    argument = x * 1
    y = rekindle.checkpoint(lambda x, y: (x.exp() * y).sin(), x, argument)
    with torch.no_grad():
        argument.add_(1)
    text = error_of(y)
    assert "argument 2" in text
    assert "changed in place" in text


def test_an_argument_error_names_the_region(x: Tensor) -> None:
    argument = x * 1
    y = rekindle.checkpoint(narrowed, argument)
    with torch.no_grad():
        argument.add_(1)
    assert "narrowed" in error_of(y)


def test_a_saved_tensor_changed_in_place_inside_the_region_is_explained(x: Tensor) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        z = y.sin()
        y.mul_(2)
        return z

    text = error_of(rekindle.checkpoint(region, x, early_stop=False))
    assert "modified by an inplace operation" in text
    assert "y.sin()" in text or "x.exp()" in text
    assert "out-of-place" in text


def test_a_mismatch_with_contexts_that_can_be_entered_once_is_explained(x: Tensor) -> None:
    """Contexts of `contextlib.contextmanager` cannot be entered again to look closely."""

    @contextmanager
    def once() -> Iterator[None]:
        yield

    y = rekindle.checkpoint(narrowed, x, context_fn=lambda: (nullcontext(), once()))
    SETTINGS.width = 4
    text = error_of(y)
    assert "float32[4, 8] cpu" in text
    assert "float32[4, 4] cpu" in text


def test_a_mismatch_that_is_gone_when_looked_at_closely_is_still_an_error(x: Tensor) -> None:
    """The region differs at every call: the second look does not find what the first one found."""
    calls = [0]

    def region(x: Tensor) -> Tensor:
        calls[0] += 1
        return (x[:2] if calls[0] == 2 else x).exp().sin()

    text = error_of(rekindle.checkpoint(region, x))
    assert "float32[4, 8] cpu" in text
    assert "float32[2, 8] cpu" in text


def test_a_region_that_fails_when_looked_at_closely_is_still_a_mismatch(x: Tensor) -> None:
    calls = [0]

    def region(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyError("third call")
        return (x[:2] if calls[0] == 2 else x).exp().sin()

    assert "Region" in error_of(rekindle.checkpoint(region, x))


def test_lines_of_an_error_are_short_enough_to_read(x: Tensor) -> None:
    class ALayerWithARatherLongNameAsOneFindsThem(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, : SETTINGS.width].exp().sin().cos().tanh()

    y = rekindle.checkpoint(ALayerWithARatherLongNameAsOneFindsThem(), x)
    SETTINGS.width = 4
    table = [line for line in error_of(y).splitlines() if line.startswith("    ")]
    assert max(map(len, table)) <= 200
