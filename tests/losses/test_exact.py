"""Exact losses: bit for bit those of the plain expression, and so are their gradients."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import rekindle
from tests.losses.heads import CLASSES, FEATURES, head, plain, some_labels, step
from tests.toys import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    assert [same_bits(a, b) for a, b in zip(one, other, strict=True)] == [True] * len(one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_mix_of_options_has_the_bits_of_the_plain_loss(
    dtype: torch.dtype, reduction: str
) -> None:
    hidden, weight, bias = head(dtype)
    labels = some_labels()
    by_class = (torch.rand(CLASSES) + 0.1).to(torch.promote_types(dtype, torch.float32))
    names = "label_smoothing", "z_loss", "softcap", "class_weight"
    for mix in product((0.0, 0.1), (0.0, 1e-3), (None, 5.0), (None, by_class)):
        options: dict[str, Any] = dict(zip(names, mix, strict=True))
        options |= {"bias": bias, "reduction": reduction}
        expected, found = (
            step(functools.partial(run, hidden, weight, labels, **options), (hidden, weight, bias))
            for run in (plain, functools.partial(rekindle.linear_cross_entropy, tile=7))
        )
        assert_same(found, expected)


@pytest.mark.parametrize("scale", [1.0, 65536.0, 1 / 3])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_gradients_scaled_from_above_have_the_bits_of_plain_ones(
    scale: float, dtype: torch.dtype
) -> None:
    hidden, weight, _ = head(dtype)
    labels = some_labels()
    assert_same(
        step(
            lambda: rekindle.linear_cross_entropy(hidden, weight, labels, tile=4), (hidden,), scale
        ),
        step(lambda: plain(hidden, weight, labels), (hidden,), scale),
    )


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 70),
    classes=st.sampled_from([2, 3, 31, 127, 1000, 1025, 4099]),
    tile=st.integers(1, 33),
    seed=st.integers(0, 99),
)
def test_any_shape_has_the_bits_of_the_plain_loss(
    tokens: int, classes: int, tile: int, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(classes, 8, requires_grad=True)
    labels = torch.randint(classes, (tokens,))
    assert_same(
        step(
            lambda: rekindle.linear_cross_entropy(hidden, weight, labels, tile=tile),
            (hidden, weight),
        ),
        step(lambda: plain(hidden, weight, labels), (hidden, weight)),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_has_the_bits_of_the_plain_loss_under_autocast(dtype: torch.dtype) -> None:
    hidden, weight, bias = head()
    labels = some_labels()

    def under(run: Callable[..., Tensor], **options: Any) -> tuple[Tensor, ...]:
        def loss() -> Tensor:
            with torch.autocast("cpu", dtype):
                return run(hidden, weight, labels, bias=bias, **options)

        return step(loss, (hidden, weight, bias))

    found = under(rekindle.linear_cross_entropy, tile=7)
    assert_same(found, under(plain))
    assert found[0].dtype == torch.float32


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3, 4)], ids=str)
def test_any_leading_dimensions_are_tokens(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(*leading, FEATURES, requires_grad=True)
    weight = torch.randn(CLASSES, FEATURES, requires_grad=True)
    labels = torch.randint(CLASSES, leading)

    def as_rows() -> Tensor:
        logits = functional.linear(hidden, weight).reshape(-1, CLASSES)
        return functional.cross_entropy(logits, labels.reshape(-1))

    assert_same(
        step(
            lambda: rekindle.linear_cross_entropy(hidden, weight, labels, tile=2),
            (hidden, weight),
        ),
        step(as_rows, (hidden, weight)),
    )


def test_hidden_states_that_are_not_contiguous_have_the_bits_of_the_plain_loss() -> None:
    hidden, weight, _ = head()
    labels = some_labels()[:, 1:]
    assert_same(
        step(
            lambda: rekindle.linear_cross_entropy(hidden[:, :-1], weight, labels, tile=7),
            (hidden, weight),
        ),
        step(lambda: plain(hidden[:, :-1], weight, labels), (hidden, weight)),
    )


def test_labels_all_ignored_give_nan_and_gradients_of_zero_as_the_plain_loss_does() -> None:
    hidden, weight, _ = head()
    labels = torch.full(hidden.shape[:-1], -100)
    for exact in (True, False):
        run = functools.partial(rekindle.linear_cross_entropy, hidden, weight, labels, exact=exact)
        loss, *grads = step(run, (hidden, weight))
        assert loss.isnan()
        assert [int(grad.count_nonzero()) for grad in grads] == [0, 0]


def test_no_tokens_give_nan_as_the_plain_loss_does() -> None:
    hidden, weight = torch.randn(0, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.long)
    for exact in (True, False):
        run = functools.partial(rekindle.linear_cross_entropy, hidden, weight, labels, exact=exact)
        loss, of_hidden, of_weight = step(run, (hidden, weight))
        assert loss.isnan()
        assert of_hidden.shape == (0, 8)
        assert int(of_weight.count_nonzero()) == 0


def test_a_backward_that_retains_its_graph_can_be_run_again() -> None:
    hidden, weight, _ = head()
    for exact in (True, False):
        loss = rekindle.linear_cross_entropy(hidden, weight, some_labels(), exact=exact, tile=7)
        first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
        assert_same(torch.autograd.grad(loss, [hidden, weight]), first)


def test_a_backward_without_a_retained_graph_cannot_be_run_again() -> None:
    hidden, weight, _ = head()
    loss = rekindle.linear_cross_entropy(hidden, weight, some_labels())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
