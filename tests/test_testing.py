"""`rekindle.testing.assert_peak`: the peak of a step as a number that a test can hold."""

from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.testing import assert_peak
from tests.planner.cases import unchanged
from tests.toys import Stack

LARGE = 2**40


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def stack() -> tuple[Stack, Tensor]:
    return Stack(3, 16), torch.randn(64, 16)


def peak_of(model: Any, batch: Any, **options: Any) -> int:
    return assert_peak(model, batch, LARGE, loss=loss_of, **options)


def test_the_peak_is_that_of_an_explanation() -> None:
    model, x = stack()
    explained = rekindle.explain(model, x, loss=loss_of, device="meta", like="H100")
    assert peak_of(model, x) == explained.peak


def test_the_limit_itself_is_within_it_and_a_byte_less_is_not() -> None:
    model, x = stack()
    peak = peak_of(model, x)
    assert assert_peak(model, x, peak, loss=loss_of) == peak
    with pytest.raises(AssertionError, match=rf"1 B .* above the limit of .*\({peak - 1} bytes\)"):
        assert_peak(model, x, peak - 1, loss=loss_of)


def test_a_model_on_the_meta_device_has_the_peak_of_a_real_one() -> None:
    with torch.device("meta"):
        without_memory = stack()
    assert peak_of(*without_memory) == peak_of(*stack())


def test_the_model_ends_as_it_was() -> None:
    model, x = stack()
    rekindle.apply(model, {"blocks.0": "recompute"})
    with unchanged(model):
        peak_of(model, x)


def test_the_optimizers_state_counts() -> None:
    model, x = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = sum(p.nbytes for p in model.parameters())
    assert peak_of(model, x, optimizer=optimizer) == peak_of(model, x) + 2 * parameters


def test_strategies_that_are_applied_are_part_of_the_step() -> None:
    model, x = stack()
    plain = peak_of(model, x)
    rekindle.apply(model, "recompute")
    recomputed = peak_of(model, x)
    profile = rekindle.profile(model, x, loss=loss_of, device="meta", like="H100")
    assert recomputed == profile.recompute_peak
    assert recomputed < plain


@pytest.fixture
def plan() -> rekindle.Plan:
    pytest.importorskip("scipy")
    profile = rekindle.profile(*stack(), loss=loss_of, device="meta", like="cpu")
    return rekindle.solve(profile, "60%")


def test_the_step_of_a_plan_peaks_where_the_plan_says(plan: rekindle.Plan) -> None:
    model, x = stack()
    assert peak_of(model, x, plan=plan, like="cpu") == plan.predicted_peak
    assert rekindle.plan_of(model) is None
    rekindle.apply(model, plan)
    assert peak_of(model, x, like="cpu") == plan.predicted_peak


def test_a_plan_stands_for_what_is_applied(plan: rekindle.Plan) -> None:
    model, x = stack()
    applied = rekindle.apply(model, {"blocks.0": "recompute"})
    assert peak_of(model, x, plan=plan, like="cpu") == plan.predicted_peak
    assert peak_of(model, x, like="cpu") != plan.predicted_peak
    assert rekindle.apply(model, {"blocks.0": "recompute"}) == applied


def test_a_plan_that_offloads_has_no_exact_peak() -> None:
    pytest.importorskip("scipy")
    with torch.device("meta"):
        model, x = Stack(4, 1024), torch.empty(4096, 1024)
    profile = rekindle.profile(model, x, loss=loss_of, device="meta", like="H100")
    plan = next(p.plan for p in rekindle.frontier(profile, 4) if p.plan.offloads)
    with pytest.raises(ValueError, match=r'The plan offloads.*plan="fit"'):
        peak_of(model, x, plan=plan)


def test_fit_is_the_plan_for_the_limit() -> None:
    pytest.importorskip("scipy")
    model, x = stack()
    limit = peak_of(model, x) - 1
    assert assert_peak(model, x, limit, loss=loss_of, plan="fit") <= limit
    with pytest.raises(AssertionError, match="step of Stack as on H100: No plan fits into 1 KiB"):
        assert_peak(model, x, 1024, loss=loss_of, plan="fit")


def test_the_error_names_what_holds_most_and_what_would_help() -> None:
    model, x = stack()
    with pytest.raises(AssertionError) as told:
        assert_peak(model, x, "20KiB", loss=loss_of)
    text = str(told.value)
    assert text.startswith("The training step of Stack as on H100 peaks at ")
    for part in ("above the limit of 20 KiB (20480 bytes).", "the peak is in the backward of "):
        assert part in text
    for title in ("most is held by", "largest saved tensors", "what would help"):
        assert f"\n  {title}\n" in text
    assert "toys.py:" in text
    assert 'rekindle.apply(model, {"blocks.*": "recompute"})' in text


def test_a_step_with_strategies_gets_no_advice_for_one_without() -> None:
    model, x = stack()
    rekindle.apply(model, "recompute")
    with pytest.raises(AssertionError) as told:
        assert_peak(model, x, "20KiB", loss=loss_of)
    assert "largest saved tensors" in str(told.value)
    assert "what would help" not in str(told.value)


def test_a_step_without_a_loss_warns_as_a_profile_does() -> None:
    with pytest.warns(UserWarning, match="The loss is not in the plan"):
        assert_peak(*stack(), LARGE)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"limit": "24GX"}, ValueError, "limit should be like"),
        ({"limit": 1.5}, TypeError, "limit should be a whole number"),
        ({"like": 3}, TypeError, "like should be the name of a device, but got int"),
        ({"like": "H1000"}, ValueError, "H1000"),
        ({"plan": "recompute"}, TypeError, 'plan should be a Plan, "fit" or None'),
        ({"optimizer": 3}, TypeError, "optimizer should be an optimizer"),
        ({"model": None}, TypeError, "takes a model"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_are_checked(options: Any, error: type[Exception], words: str) -> None:
    model, x = stack()
    with pytest.raises(error, match=words):
        assert_peak(**{"model": model, "batch": x, "limit": LARGE, "loss": loss_of, **options})
