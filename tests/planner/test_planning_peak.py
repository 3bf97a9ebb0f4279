"""The peak of planning itself: no higher than a step with every block recomputed."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.instruments.memory_meter import LiveBytes
from rekindle.planner.measure.whole_step_calibration import SLACK
from tests.planner.language_models import Case, bert, every_model, gpt2, shared_bias, t5

pytest.importorskip("scipy")


def peak_of_a_recomputed_step(
    model: nn.Module, batch: dict[str, Tensor], blocks: Iterable[str]
) -> int:
    """Bytes that a step with blocks recomputed makes at its highest, gradients in place."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    rekindle.apply(model, dict.fromkeys(blocks, "recompute"))
    with LiveBytes([*known, *(p.grad for p in model.parameters() if p.grad is not None)]) as live:
        model(**batch).loss.backward()
    rekindle.remove(model)
    model.zero_grad()
    return live.peak()


@pytest.mark.parametrize("case", [gpt2, bert, t5, shared_bias])
def test_planning_peaks_no_higher_than_a_step_with_every_block_recomputed(
    case: Callable[[], Case],
) -> None:
    model, batch = case()
    profile = rekindle.profile(model, batch)
    peak = peak_of_a_recomputed_step(model, batch, [path for path, _ in profile.order])
    assert profile.recompute_peak == profile.static_bytes + peak
    assert profile.planning_peak is not None
    assert profile.planning_peak - profile.static_bytes <= (1 + SLACK) * peak


def test_a_plan_has_the_planning_peak() -> None:
    model, batch = gpt2()
    profile = rekindle.profile(model, batch)
    assert rekindle.fit(model, batch, "80%", profile=profile).planning_peak == profile.planning_peak


@every_model
def test_what_is_seen_from_outside_is_the_planning_peak(case: Callable[[], Case]) -> None:
    model, batch = case()
    with LiveBytes([*model.parameters(), *model.buffers(), *batch.values()]) as live:
        profile = rekindle.profile(model, batch)
    copies = sum(buffer.nbytes for buffer in model.buffers())  # which wait in host memory
    assert profile.planning_peak == profile.static_bytes + live.peak() - copies


def test_gradients_that_are_there_already_make_no_difference_to_the_planning_peak() -> None:
    model, batch = gpt2()
    without = rekindle.profile(model, batch).planning_peak
    model(**batch).loss.backward()
    assert rekindle.profile(model, batch).planning_peak == without
