"""Losses where models call them: tied and adapted weights, regions, offload, transforms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle import policies
from rekindle.errors import RekindleError
from tests.losses.heads import CLASSES, FEATURES, head, plain, relative_error, some_labels
from tests.toys import assert_same_step

loss_of = rekindle.linear_cross_entropy


def test_a_tied_weight_gets_the_gradients_of_both_its_uses() -> None:
    tied, labels = nn.Embedding(CLASSES, FEATURES), some_labels(ignored=0)

    def run(loss: Callable[..., Tensor]) -> Tensor:
        return loss(tied(labels).tanh(), tied.weight, labels)

    assert_same_step(lambda: run(plain), lambda: run(loss_of), [tied.weight])


@pytest.mark.parametrize("frozen", [True, False])
def test_a_head_with_an_adapter_trains_the_adapter(frozen: bool) -> None:
    """LoRA on the head: its weight is computed, so it is no leaf."""
    hidden, weight, _ = head()
    a = torch.randn(4, FEATURES, requires_grad=True)
    b = torch.randn(CLASSES, 4, requires_grad=True)
    weight.requires_grad_(not frozen)
    leaves = [hidden, a, b] if frozen else [hidden, a, b, weight]
    assert_same_step(
        lambda: plain(hidden, weight + b @ a, some_labels()),
        lambda: loss_of(hidden, weight + b @ a, some_labels(), tile=7),
        leaves,
    )
    loss_of(hidden, weight + b @ a, some_labels(), exact=False, tile=7).backward()
    assert (weight.grad is None) is frozen


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "region",
    [
        rekindle.checkpoint,
        lambda run: rekindle.checkpoint(run, determinism_check="values"),
        lambda run: rekindle.checkpoint(run, context_fn=policies.keep_matmuls),
        lambda run: rekindle.checkpoint(run, context_fn=policies.offload(policies.MATMULS)),
        lambda run: torch.utils.checkpoint.checkpoint(run, use_reentrant=False),
    ],
    ids=["whole", "values", "keep matmuls", "offload matmuls", "torch"],
)
def test_a_loss_in_a_region_is_as_outside(region: Callable[..., Tensor], exact: bool) -> None:
    hidden, weight, _ = head()

    def run() -> Tensor:
        return loss_of(hidden.tanh(), weight * 2, some_labels(), exact=exact, tile=7)

    assert_same_step(run, lambda: region(run), [hidden, weight])


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_under_offload_is_as_without(exact: bool) -> None:
    hidden, weight, _ = head()

    def run() -> Tensor:
        return loss_of(hidden.tanh(), weight, some_labels(), exact=exact, tile=7)

    def offloaded() -> Tensor:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            return run()

    assert_same_step(run, offloaded, [hidden, weight])


def test_the_logits_of_a_kept_matmul_are_there_for_a_second_backward() -> None:
    """Contrived: the policy keeps what backward writes over."""
    hidden, weight, _ = head()
    loss = rekindle.checkpoint(
        lambda: loss_of(hidden, weight, some_labels(), tile=7), context_fn=policies.keep_matmuls
    )
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(map(torch.equal, first, second))


def test_labels_out_of_range_raise_as_in_torch() -> None:
    hidden, weight, _ = head()
    labels = some_labels()
    labels[1, 2] = CLASSES
    for exact in (True, False):
        with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
            loss_of(hidden, weight, labels, exact=exact)


@pytest.mark.parametrize("options", [{}, {"exact": False, "reduction": "none"}], ids=str)
def test_a_second_derivative_is_that_of_the_plain_loss(options: dict[str, Any]) -> None:
    hidden, weight, bias = head(torch.float64)

    def penalty(loss: Callable[..., Tensor], **options: Any) -> tuple[Tensor, ...]:
        out = loss(hidden, weight, some_labels(), bias=bias, **options)
        grads = torch.autograd.grad(out.square().sum(), [hidden, weight, bias], create_graph=True)
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        return torch.autograd.grad(square, [hidden, weight, bias])

    found = penalty(loss_of, tile=7, **options)
    expected = penalty(plain, reduction=options.get("reduction", "mean"))
    assert max(map(relative_error, found, expected)) < 1e-12


def test_a_second_derivative_of_a_tiled_sum_is_refused() -> None:
    hidden, weight, _ = head()
    loss = loss_of(hidden, weight, some_labels(), exact=False)
    with pytest.raises(RekindleError, match=r"no second derivative.*exact=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("exact", [True, False])
def test_transforms_of_torch_func_go_through_plain_ops(exact: bool) -> None:
    hidden, weight, _ = (each.detach() for each in head())
    labels = some_labels()
    found = torch.func.grad(lambda h: loss_of(h, weight, labels, exact=exact))(hidden)
    expected = torch.func.grad(lambda h: plain(h, weight, labels))(hidden)
    assert relative_error(found, expected) < 1e-6
    each = torch.func.vmap(lambda h, y: loss_of(h, weight, y, exact=exact))(hidden, labels)
    assert each.shape == (3,)


@pytest.mark.parametrize("exact", [True, False])
def test_a_training_step_under_a_gradient_scaler_is_as_plain(exact: bool) -> None:
    hidden, weight, _ = head()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(loss: Callable[..., Tensor], **options: Any) -> Tensor:
        before = weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = loss(hidden, weight, some_labels(), **options)
        scaler.scale(out).backward()
        scaler.step(optimizer)
        scaler.update()
        after = weight.detach().clone()
        weight.data.copy_(before)
        return after

    found, expected = step(loss_of, exact=exact, tile=7), step(plain)
    assert relative_error(found, expected) <= (0 if exact else 1e-3)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"hidden": [1]}, TypeError, "hidden should be a tensor, but got list"),
        ({"weight": torch.ones(5, 4)}, ValueError, r"\[3, 15, 16\] and \[5, 4\]"),
        ({"bias": torch.ones(7)}, ValueError, r"bias should be \(103,\), but got \[7\]"),
        ({"labels": torch.zeros(45, dtype=torch.long)}, ValueError, r"shape \[3, 15\].*\[45\]"),
        ({"labels": torch.zeros(3, 15)}, ValueError, "class indices.*linear_per_token"),
        ({"weight": torch.ones(103, 16).bfloat16()}, ValueError, "bfloat16: cast one of them"),
        ({"tile": 0}, ValueError, "at least 1, but got 0"),
        ({"reduction": "avg"}, ValueError, "but got 'avg'"),
        ({"label_smoothing": 2}, ValueError, "from 0 to 1"),
        ({"softcap": 0}, ValueError, "softcap should be above 0"),
        ({"class_weight": torch.ones(4)}, ValueError, r"class_weight should be \(103,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    hidden, weight, _ = head()
    given = {"hidden": hidden, "weight": weight, "labels": some_labels()} | change
    with pytest.raises(error, match=says):
        loss_of(**given)


def test_a_head_without_gradients_gives_a_loss_without_a_graph() -> None:
    hidden, weight, _ = head()
    with torch.no_grad():
        assert not loss_of(hidden, weight, some_labels()).requires_grad
        assert not loss_of(hidden, weight, some_labels(), exact=False).requires_grad
    logits = functional.linear(hidden, weight)
    assert logits.requires_grad
