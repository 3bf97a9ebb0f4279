"""Tiled losses: no less accurate than plain ones, and what they run."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from tests.losses.heads import CLASSES, FEATURES, head, plain, relative_error, some_labels, step

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"softcap": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_tiled_loss_in_float64_is_the_plain_one(options: dict[str, Any]) -> None:
    hidden, weight, bias = head(torch.float64)
    options = options | {"bias": bias}
    expected, found = (
        step(functools.partial(run, hidden, weight, some_labels(), **options), (hidden, weight))
        for run in (plain, functools.partial(rekindle.linear_cross_entropy, exact=False, tile=7))
    )
    assert max(map(relative_error, found, expected)) < 1e-14


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_of_a_tiled_loss_is_at_most_a_hundredth_above_that_of_the_plain_one(
    dtype: torch.dtype, reduction: str, scale: float
) -> None:
    """Against a run in float64 on the same numbers, in 40 tiles.

    The seed is one at which gradients of float16 do not overflow.
    """
    torch.manual_seed(0)
    tokens, classes, features = 640, 512, 64
    hidden = torch.randn(tokens, features).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features) / 8).to(dtype).requires_grad_()
    labels = torch.randint(classes, (tokens,))
    if dtype == torch.float16 and reduction != "mean":
        scale = 1.0  # as a gradient scaler would find

    def gradients(run: Any, leaves: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
        return step(lambda: run(*leaves, labels, reduction=reduction, **options), leaves, scale)

    wide = tuple(each.detach().double().requires_grad_() for each in (hidden, weight))
    right = gradients(plain, wide)
    theirs = gradients(plain, (hidden, weight))
    ours = gradients(rekindle.linear_cross_entropy, (hidden, weight), exact=False, tile=16)
    for found, other, expected in zip(ours, theirs, right, strict=True):
        assert relative_error(found, expected) <= 1.01 * relative_error(other, expected) + 1e-7


def test_gradients_of_a_mean_in_float16_do_not_vanish_without_a_scaler() -> None:
    """In a plain step, those of most classes are below the least number of float16."""
    hidden, weight = head(torch.float16)[:2]
    hidden, labels = hidden.detach(), torch.zeros(3, 15, dtype=torch.long)
    many, same = hidden.repeat(2000, 1, 1), labels.repeat(2000, 1)
    small = (weight.detach() * 0.01).requires_grad_()
    _, of_weight = step(
        lambda: rekindle.linear_cross_entropy(many, small, same, exact=False, tile=4096), (small,)
    )
    _, of_plain = step(lambda: plain(many, small, same), (small,))
    wide = small.detach().double().requires_grad_()
    _, right = step(lambda: plain(many.double(), wide, same), (wide,))
    assert relative_error(of_weight, right) < 0.002 < 0.01 < relative_error(of_plain, right)


class Ops(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def matmuls(trained: str, **options: Any) -> int:
    """Matmuls of a step that trains these of `hidden` and `weight`; 45 tokens are 3 tiles."""
    hidden, weight, _ = (each.detach() for each in head())
    if "hidden" in trained:
        hidden.requires_grad_()
    if "weight" in trained:
        weight.requires_grad_()
    with Ops() as ops:
        loss = rekindle.linear_cross_entropy(hidden, weight, some_labels(), tile=15, **options)
        if loss.requires_grad:
            loss.sum().backward()
    return ops.count["mm"] + ops.count["addmm"] + ops.count["addmm_"]


@pytest.mark.parametrize(
    ("trained", "exact", "summed", "each"),
    [
        ("hidden, weight", 3, 9, 12),
        ("hidden", 2, 6, 9),
        ("weight", 2, 6, 9),
        ("nothing", 1, 3, 3),
    ],
)
def test_gradients_that_nobody_wants_are_not_computed(
    trained: str, exact: int, summed: int, each: int
) -> None:
    """With three tiles, three times as many matmuls; with a loss per token, a tile runs again."""
    assert matmuls(trained) == exact
    assert matmuls(trained, exact=False) == summed
    assert matmuls(trained, exact=False, reduction="none") == each


def test_a_tiled_loss_under_autocast_has_the_dtypes_of_the_plain_one() -> None:
    hidden, weight, bias = head()
    with torch.autocast("cpu", torch.bfloat16):
        loss = rekindle.linear_cross_entropy(
            hidden, weight, some_labels(), bias=bias, exact=False, tile=7
        )
    loss.backward()
    assert loss.dtype == torch.float32
    assert [each.grad.dtype for each in (hidden, weight, bias) if each.grad is not None] == [
        torch.float32
    ] * 3


def test_the_error_of_a_tiled_loss_under_autocast_is_no_larger_than_that_of_the_plain_one() -> None:
    hidden, weight, _ = head()
    labels = some_labels()

    def under(run: Any, **options: Any) -> tuple[Tensor, ...]:
        def loss() -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return run(hidden, weight, labels, **options)

        return step(loss, (hidden, weight))

    wide = tuple(each.detach().double().requires_grad_() for each in (hidden, weight))
    right = step(lambda: plain(*wide, labels), wide)
    ours = under(rekindle.linear_cross_entropy, exact=False, tile=7)
    theirs = under(plain)
    for found, other, expected in zip(ours, theirs, right, strict=True):
        assert relative_error(found, expected) <= relative_error(other, expected) + 1e-7


def test_shapes_of_no_tile_are_right() -> None:
    weight = torch.randn(CLASSES, FEATURES)
    hidden = torch.randn(2, 0, FEATURES)
    labels = torch.zeros(2, 0, dtype=torch.long)
    loss = rekindle.linear_cross_entropy(hidden, weight, labels, reduction="none", exact=False)
    assert loss.shape == (2, 0)
