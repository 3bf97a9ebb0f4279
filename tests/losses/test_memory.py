"""What is held at the peak, counted in tiles of logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import rekindle
from rekindle.planner.instruments.memory_meter import LiveBytes

TOKENS, CLASSES, TILE = 64, 4096, 8
"""Eight tiles of logits. Everything that is not logits, gradients included, is less than half a
tile: features are few."""


def peak_in_tiles(
    run: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> int:
    """The peak of a step, in tiles of logits in float32."""
    hidden = torch.randn(TOKENS, 1, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, 1, dtype=dtype, requires_grad=True)
    labels = torch.randint(CLASSES, (TOKENS,))
    with LiveBytes([hidden, weight, labels]) as meter:
        loss = run(hidden, weight, labels, **options)
        if loss.requires_grad:
            loss.sum().backward()
        return round(meter.peak() / (4 * TILE * CLASSES))


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [(torch.float32, 8 + 3), (torch.float64, 2 * (8 + 3)), (torch.bfloat16, 4 + 3)],
    ids=str,
)
def test_an_exact_step_holds_the_logits_and_three_tiles(dtype: torch.dtype, peak: int) -> None:
    """A tile of log-probabilities and two of gradients, in the dtype of the loss."""
    assert peak_in_tiles(rekindle.linear_cross_entropy, dtype, tile=TILE) == peak


@pytest.mark.parametrize(
    ("dtype", "peak"), [(torch.float32, 3 * 8), (torch.bfloat16, 3 * 8)], ids=str
)
def test_a_plain_step_holds_three_times_the_logits_in_float32(
    dtype: torch.dtype, peak: int
) -> None:
    assert peak_in_tiles(plain, dtype) == peak


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tiled_step_holds_three_tiles(dtype: torch.dtype, reduction: str) -> None:
    options = {"exact": False, "tile": TILE, "reduction": reduction}
    assert peak_in_tiles(rekindle.linear_cross_entropy, dtype, **options) == 3


def test_without_gradients_an_exact_loss_holds_the_logits_and_one_tile() -> None:
    with torch.no_grad():
        assert peak_in_tiles(rekindle.linear_cross_entropy, tile=TILE) == 8 + 1


def test_without_gradients_a_tiled_loss_holds_two_tiles() -> None:
    with torch.no_grad():
        assert peak_in_tiles(rekindle.linear_cross_entropy, tile=TILE, exact=False) == 2


def test_a_retained_graph_keeps_the_logits_and_their_gradient() -> None:
    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = rekindle.linear_cross_entropy(hidden, weight, labels, tile=TILE)
        loss.backward(retain_graph=True)
        return loss.detach()

    assert peak_in_tiles(run) == 8 + 8 + 3


def test_log_probs_with_entropy_hold_the_logits_and_four_tiles() -> None:
    """A tile more, for the probabilities."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_probs, entropy = rekindle.linear_log_probs(
            hidden, weight, labels, entropy=True, tile=TILE
        )
        return log_probs + entropy

    assert peak_in_tiles(run) == 8 + 4
