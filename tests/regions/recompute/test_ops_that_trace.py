"""Ops that make graphs of their own functions while they run: flex attention, `cond`, `scan`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

import rekindle
from rekindle.policies import keep, keep_matmuls, recompute, spill
from tests.toys import assert_same_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

Function = Callable[[Tensor], Any]

POLICIES = [
    keep(),
    recompute(),
    keep_matmuls,
    keep(torch.ops.higher_order.flex_attention),
]
WAYS: dict[str, Callable[[Function, Tensor], Any]] = {
    "region": rekindle.checkpoint,
    "region without early stop": lambda f, x: rekindle.checkpoint(f, x, early_stop=False),
    "region whose values are checked": lambda f, x: rekindle.checkpoint(
        f, x, determinism_check="values"
    ),
    "region in a region": lambda f, x: rekindle.checkpoint(
        lambda y: rekindle.checkpoint(f, y) * 2, x
    ),
    **{
        f"policy {i}": lambda f, x, policy=policy: rekindle.checkpoint(f, x, context_fn=policy)
        for i, policy in enumerate(POLICIES)
    },
    "policy in a region": lambda f, x: rekindle.checkpoint(
        lambda y: rekindle.checkpoint(f, y, context_fn=keep_matmuls) * 2, x
    ),
}
ALL_WAYS = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses gradients of flex attention there, though its unfused form has them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)


def attend(x: Tensor) -> Tensor:
    scale = torch.linspace(0.1, 2, 16, device=x.device)
    out: Any = flex.flex_attention(
        x.sin(), x.cos(), x, lambda score, b, h, q, k: (score * scale[k]).tanh()
    )
    return out.sin()  # type: ignore[no-any-return]


def branch(x: Tensor) -> Tensor:
    taken = torch.cond(x.sum() > 0, lambda y: y.sin() * y, lambda y: y.cos() * y, (x.exp(),))
    return taken.sin()  # type: ignore[no-any-return]


@ALL_WAYS
def test_flex_attention_has_the_plain_gradients(way: str, flex_on_a_cpu: None) -> None:
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    factor = 2 if " in a region" in way else 1
    assert_same_step(lambda: attend(x) * factor, lambda: WAYS[way](attend, x), [x])


@ALL_WAYS
def test_flex_attention_twice_in_a_region(way: str, flex_on_a_cpu: None) -> None:
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    factor = 2 if " in a region" in way else 1

    def twice(x: Tensor) -> Tensor:
        return attend(attend(x) * x)

    assert_same_step(lambda: twice(x) * factor, lambda: WAYS[way](twice, x), [x])


def test_flex_attention_that_is_offloaded(flex_on_a_cpu: None, written_at_once: None) -> None:
    x = torch.randn(1, 2, 16, 8, requires_grad=True)

    def offloaded() -> Tensor:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            return attend(x)

    assert_same_step(lambda: attend(x), offloaded, [x])


@ALL_WAYS
def test_a_branch_has_the_plain_gradients(way: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    factor = 2 if " in a region" in way else 1
    assert_same_step(lambda: branch(x) * factor, lambda: WAYS[way](branch, x), [x])


def test_a_branch_can_be_observed_and_debugged() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with rekindle.observe() as seen:
        rekindle.checkpoint(branch, x, early_stop=False).sum().backward()
    assert seen.total.ops_replayed == 5  # sum, >, exp, cond, sin
    assert_same_step(lambda: branch(x), lambda: rekindle.checkpoint(branch, x, debug=True), [x])


def test_a_mismatch_after_a_branch_is_told_where_it_is() -> None:
    def region(x: Tensor) -> Tensor:
        y = branch(x)
        return y.cosh() if not rekindle.is_recomputing() else y[:2].cosh()

    with pytest.raises(rekindle.CheckpointError, match="cosh"):
        rekindle.checkpoint(region, torch.randn(4, 8, requires_grad=True)).sum().backward()


def test_a_model_with_a_branch_is_fitted() -> None:
    pytest.importorskip("scipy")

    class Branching(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return branch(super().forward(x))

    model, x = torch.nn.Sequential(*[Branching(8, 8) for _ in range(3)]), torch.randn(64, 8)
    plan = rekindle.fit(model, x, "120%")
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget


def test_what_a_transform_inside_makes_is_not_spilled(written_at_once: None) -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def region(x: Tensor) -> Tensor:
        out, along = torch.func.jvp(lambda y: (y @ weight).sin(), (x,), (x.cos(),))
        return out.exp() + along @ weight  # type: ignore[no-any-return]

    def spilled() -> Any:
        return rekindle.checkpoint(region, x, context_fn=spill())

    def around() -> Any:
        with rekindle.offload(tier="disk", quota=1.0, min_bytes=1):
            return region(x)

    for other in (spilled, around):
        assert_same_step(lambda: region(x), other, [x, weight])


@pytest.mark.gpu
@ALL_WAYS
def test_on_a_gpu_flex_attention_has_the_plain_gradients(way: str) -> None:
    x = torch.randn(1, 2, 16, 16, device="cuda", requires_grad=True)
    factor = 2 if " in a region" in way else 1
    assert_same_step(lambda: attend(x) * factor, lambda: WAYS[way](attend, x), [x])
