"""Log-probabilities, entropies, and any function per token, against plain expressions."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rekindle
from rekindle.errors import RekindleError
from tests.losses.heads import CLASSES, LEADING, head, relative_error, some_labels
from tests.toys import assert_same_step, same_bits


def plain_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0
) -> Tensor:
    logits = functional.linear(hidden, weight).float() / temperature
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def plain_entropy(hidden: Tensor, weight: Tensor, temperature: float = 1.0) -> Tensor:
    log_probs = (functional.linear(hidden, weight).float() / temperature).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_log_probs_have_the_bits_of_the_plain_expression(
    dtype: torch.dtype, temperature: float
) -> None:
    hidden, weight, _ = head(dtype)
    labels = some_labels(ignored=0)
    assert_same_step(
        lambda: plain_log_probs(hidden, weight, labels, temperature),
        lambda: rekindle.linear_log_probs(hidden, weight, labels, temperature=temperature, tile=7),
        [hidden, weight],
    )


@pytest.mark.parametrize("exact", [True, False])
def test_entropies_are_those_of_the_plain_expression(exact: bool) -> None:
    hidden, weight, _ = head(torch.float32)
    labels = some_labels(ignored=0)
    log_probs, entropy = rekindle.linear_log_probs(
        hidden, weight, labels, temperature=0.7, entropy=True, exact=exact, tile=7
    )
    expected = plain_entropy(hidden, weight, 0.7)
    assert relative_error(entropy, expected) < 1e-6
    grads = torch.autograd.grad((entropy * log_probs).sum(), [hidden, weight])
    product = expected * plain_log_probs(hidden, weight, labels, 0.7)
    plain_grads = torch.autograd.grad(product.sum(), [hidden, weight])
    assert max(map(relative_error, grads, plain_grads)) < 1e-5


def test_the_entropy_alone_has_a_gradient() -> None:
    hidden, weight, _ = head()
    _, entropy = rekindle.linear_log_probs(
        hidden, weight, some_labels(ignored=0), entropy=True, tile=7
    )
    found = torch.autograd.grad(entropy.sum(), [hidden, weight])
    expected = torch.autograd.grad(plain_entropy(hidden, weight).sum(), [hidden, weight])
    assert max(map(relative_error, found, expected)) < 1e-5


def test_ignored_tokens_have_zeros_and_no_gradient() -> None:
    hidden, weight, _ = head()
    labels = some_labels()
    log_probs, entropy = rekindle.linear_log_probs(hidden, weight, labels, entropy=True, tile=7)
    (grad,) = torch.autograd.grad((log_probs + entropy).sum(), hidden)
    ignored = labels == -100
    assert not log_probs[ignored].any()
    assert not entropy[ignored].any()
    assert not grad[ignored].any()


def weighted(logits: Tensor, labels: Tensor, weights: Tensor, power: float) -> Tensor:
    """A loss per token with arguments of every kind."""
    picked = logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (-picked) ** power * weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_function_has_the_bits_of_its_plain_run(dtype: torch.dtype) -> None:
    hidden, weight, bias = head(dtype)
    labels, weights = some_labels(ignored=0), torch.rand(LEADING, requires_grad=True)
    assert_same_step(
        lambda: weighted(functional.linear(hidden, weight, bias), labels, weights, 2.0),
        lambda: rekindle.linear_per_token(
            hidden, weight, weighted, labels, weights, 2.0, bias=bias, tile=7
        ),
        [hidden, weight, bias, weights],
    )


def test_any_function_by_tiles_is_its_plain_run() -> None:
    hidden, weight, bias = head(torch.float64)
    labels = some_labels(ignored=0)
    weights = torch.rand(LEADING, requires_grad=True)
    leaves = [hidden, weight, bias, weights]
    found, expected = (
        torch.autograd.grad(out.square().sum(), leaves)
        for out in (
            rekindle.linear_per_token(
                *(hidden, weight, weighted, labels, weights, 2.0), bias=bias, exact=False, tile=7
            ),
            weighted(functional.linear(hidden, weight, bias), labels, weights, 2.0),
        )
    )
    assert max(map(relative_error, found, expected)) < 1e-6


class Seen(NamedTuple):
    best: Tensor
    highest: Tensor


def look(logits: Tensor) -> dict[str, Any]:
    top = logits.max(-1)
    return {"seen": Seen(top.indices, top.values), "three": logits[..., :3]}


def test_a_function_may_return_any_container_of_tensors() -> None:
    hidden, weight, _ = head()
    assert_same_step(
        lambda: look(functional.linear(hidden, weight)),
        lambda: rekindle.linear_per_token(hidden, weight, look, tile=7),
        [hidden, weight],
    )


def test_a_tensor_that_every_tile_gets_whole_has_the_sum_of_its_gradients() -> None:
    hidden, weight, _ = head(torch.float64)
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def spread(logits: Tensor, temperature: Tensor) -> Tensor:
        return (logits / temperature).log_softmax(-1).square().sum(-1)

    for exact in (True, False):
        out = rekindle.linear_per_token(hidden, weight, spread, temperature, exact=exact, tile=7)
        (found,) = torch.autograd.grad(out.sum(), temperature)
        out = spread(functional.linear(hidden, weight), temperature)
        (expected,) = torch.autograd.grad(out.sum(), temperature)
        assert relative_error(found, expected) < 1e-12


def test_a_function_runs_under_the_autocast_of_its_call_in_backward_too() -> None:
    hidden, weight, _ = head()
    seen = []

    def watching(logits: Tensor) -> Tensor:
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu")))
        return logits.float().log_softmax(-1)[:, 0]

    for exact in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            out = rekindle.linear_per_token(hidden, weight, watching, exact=exact, tile=45)
        out.sum().backward()
    assert seen == [(torch.bfloat16, True)] * 4


def test_a_function_that_uses_a_trainable_tensor_it_is_not_given_is_refused() -> None:
    hidden, weight, _ = head()
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(RekindleError, match=r"not among its arguments.*Pass them"):
        rekindle.linear_per_token(hidden, weight, lambda logits: (logits * scale).sum(-1))


def test_a_function_that_draws_random_numbers_is_refused() -> None:
    hidden, weight, _ = head()
    with pytest.raises(RekindleError, match=r"drew random numbers.*Draw them before"):
        rekindle.linear_per_token(
            hidden, weight, lambda logits: (logits + torch.rand_like(logits)).sum(-1)
        )


def test_a_function_that_reduces_over_tokens_is_refused() -> None:
    hidden, weight, _ = head()
    with pytest.raises(RekindleError, match=r"45 rows for logits of shape \[45, 103\].*\[\]"):
        rekindle.linear_per_token(hidden, weight, lambda logits: logits.mean())


def test_a_function_that_does_not_use_the_logits_gives_them_no_gradient() -> None:
    hidden, weight, _ = head()
    weights = torch.rand(LEADING, requires_grad=True)
    out = rekindle.linear_per_token(hidden, weight, lambda _, w: w * 2, weights, tile=7)
    of_hidden, of_weights = torch.autograd.grad(out.sum(), [hidden, weights])
    assert not of_hidden.any()
    assert same_bits(of_weights, torch.full(LEADING, 2.0))


def test_classes_are_those_of_the_weight() -> None:
    hidden, weight, _ = head()
    shapes = rekindle.linear_per_token(hidden, weight, lambda logits: logits * 1, tile=7).shape
    assert shapes == (*LEADING, CLASSES)
