"""A saved tensor that is changed in place raises under offload as it does in plain autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.offload.as_plain import assert_plain_gradients, padded, plain_and_offloaded
from tests.offloading import leaf, spilling
from tests.toys import same_bits

pytestmark = pytest.mark.usefixtures("new_offloaders", "written_at_once")


CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda h: h.add_(1),
    "a view": lambda h: h[:1].zero_(),
    "detached": lambda h: h.detach().mul_(2),
    "without gradients": lambda h: torch.no_grad()(Tensor.mul_)(h, 2),
    "in inference mode": lambda h: torch.inference_mode()(Tensor.mul_)(h.detach(), 2),
    "out=": lambda h: torch.no_grad()(torch.add)(h, 1, out=h.detach()),
    "copied into": lambda h: h.copy_(torch.ones_like(h)),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
@pytest.mark.parametrize("is_held", [True, False])
def test_a_saved_tensor_that_was_changed_raises_as_it_does_plain(
    change: Callable[[Tensor], Any], is_held: bool
) -> None:
    x = leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x.exp() + 1
            out = padded(h.sin())
            change(h)
            held = h if is_held else None
            del h
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        del held


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_a_result_that_is_saved_and_was_changed_raises_as_it_does_plain(
    change: Callable[[Tensor], Any],
) -> None:
    x = leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x.sin().exp()
            out = padded(h + 1)
            change(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (out.sum() + h.sum()).backward()


def test_a_small_tensor_that_was_changed_raises_as_it_does_plain() -> None:
    x = leaf(16)
    for context in plain_and_offloaded(min_bytes=4096):
        with context:
            h = x + 1
            out = h.sin()
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_parameter_that_was_changed_raises_as_it_does_plain() -> None:
    x, w = leaf(16), nn.Parameter(torch.randn(16))
    for context in plain_and_offloaded():
        with context:
            out = padded((x + 1) * w)
        with torch.no_grad():
            w.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_changed_factor_of_a_product_raises_as_it_does_plain() -> None:
    x, w = leaf(16), leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x + 1
            out = padded(h * (w + 1))
            h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_error_says_what_was_changed_and_what_to_do() -> None:
    x = leaf(16)
    with spilling():
        h = x + 1
        out = h.sin()
        h.add_(1)
    with pytest.raises(
        rekindle.RekindleError,
        match=r"float32 \[16\], made by AddBackward0, is at version 1; expected version 0",
    ):
        out.sum().backward()


def test_a_tensor_changed_before_it_is_saved_is_no_error() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = x.exp() + 1
        h.mul_(2)
        h[:3].add_(1)
        return padded(h.sin().exp())

    assert_plain_gradients(run, [x])


def test_a_change_to_what_backward_does_not_need_is_no_error() -> None:
    x = leaf(16)

    def run() -> Tensor:
        h = x + 1
        out = padded((h * 2).exp())
        h.zero_()
        return out + h

    assert_plain_gradients(run, [x])


def test_a_tensor_saved_before_and_after_a_change_is_wanted_as_it_was_after() -> None:
    """Backward never gets to what was saved before the change."""
    x = leaf(16)

    def run() -> Tensor:
        h = x + 1
        h.sin()
        h.mul_(2)
        return padded(h.cos())

    assert_plain_gradients(run, [x])


def test_a_saved_alias_with_versions_of_its_own_raises_when_it_was_changed() -> None:
    """`h.data` is the storage of `h`, with a version counter of its own."""
    x, w = leaf(16), leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x + 1
            first = h.sin()
            alias = h.data
            out = w * alias
            alias.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        del first


def test_a_saved_alias_with_versions_of_its_own_is_no_error_when_the_other_was_changed() -> None:
    x, w = leaf(16), leaf(16)
    for context in plain_and_offloaded():
        with context:
            h = x + 1
            first = h.sin()
            out = w * h.data
            with torch.no_grad():
                h.mul_(1)
        assert same_bits(torch.autograd.grad(out.sum(), w)[0], x.detach() + 1)
        del first


def test_relu_in_place_has_plain_gradients() -> None:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3))] * 4
    )
    x = leaf(4, 8)
    assert_plain_gradients(lambda: model(x), [x, *model.parameters()])


def test_views_changed_in_place_have_plain_gradients() -> None:
    x = leaf(8, 8)

    def run() -> Tensor:
        h = x * 2
        h[:, 1::2] = (h[:, ::2] + 1).sin()
        h.t()[0].mul_(2)
        a, b = h.view(4, 16).unbind(0)[:2]
        return padded((a * b).sigmoid_() * h[0, 0])

    assert_plain_gradients(run, [x])
