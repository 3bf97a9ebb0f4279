"""Bytes of explanations are those of the planner's meter, each of them once."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.explanation.record import record_step
from rekindle.explanation.summarize import walk
from rekindle.planner.instruments.memory_meter import LiveBytes, bytes_of
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.trace.fake_tensors import with_fake_tensors
from rekindle.planner.training_step import TrainingStep
from tests.explanation.models import DIM, every_case, gpt, tied
from tests.planner.cases import Case
from tests.planner.fake_cases import every_case as every_planned_case

pytestmark = pytest.mark.filterwarnings("ignore:The loss is not in the plan")


def metered_peak(step: TrainingStep) -> int:
    """The peak of a step as it is, by a meter without anything that records."""
    torch.clear_autocast_cache()
    with LiveBytes(step.existing_tensors()) as meter:
        step()
    return meter.peak()


def recorded_peak(step: TrainingStep) -> int:
    return walk(record_step(step, torch.device("cpu"))).peak


@every_case
def test_the_peak_is_that_of_the_meter(case: Callable[[], Case]) -> None:
    step = TrainingStep(*case())
    with repeatable(step):
        peak = metered_peak(step)
        assert recorded_peak(step) == peak > 0


@every_planned_case
def test_the_peak_of_planned_models_is_that_of_the_meter(case: Callable[[], Case]) -> None:
    step = TrainingStep(*case())
    with repeatable(step):
        peak = metered_peak(step)
        assert recorded_peak(step) == peak > 0


@every_case
@pytest.mark.parametrize("device", ["cpu", "H100"])
def test_the_peak_on_fake_tensors_is_that_of_the_meter(
    case: Callable[[], Case], device: str
) -> None:
    model, batch = case()
    with with_fake_tensors(model, batch, as_on=device) as given:
        step = TrainingStep(model, given)
        with repeatable(step):
            peak = metered_peak(step)
            assert recorded_peak(step) == peak > 0


@cache
def explained(case: Callable[[], Case]) -> tuple[rekindle.Explanation, int]:
    """A case explained without memory, with the peak of its step by the meter."""
    model, batch = case()
    step = TrainingStep(model, batch)
    with repeatable(step):
        peak = metered_peak(step)
    return rekindle.explain(model, batch, device="meta", like="cpu"), peak


@every_case
@pytest.mark.usefixtures("few_sets")
def test_the_peak_without_memory_is_the_one_with(case: Callable[[], Case]) -> None:
    found, peak = explained(case)
    assert found.source == "fake tensors"
    assert found.peak - found.static_bytes == peak


@pytest.mark.usefixtures("few_sets")
def test_what_is_there_all_the_time_is_counted_by_kind() -> None:
    model, batch = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    found = rekindle.explain(model, batch, optimizer=optimizer, device="meta", like="cpu")
    at_peak = {each.name: each.at_peak for each in found.kinds}
    parameters = bytes_of(model.parameters())
    assert at_peak["parameters"] == at_peak["gradients"] == parameters
    assert at_peak["optimizer"] == 2 * parameters
    assert at_peak["batch"] == batch.nbytes
    assert at_peak["other"] == at_peak["buffers"] == 0
    assert found.static_bytes == 4 * parameters + batch.nbytes


@pytest.mark.usefixtures("few_sets")
def test_a_weight_that_two_modules_share_counts_for_the_first() -> None:
    found, _ = explained(tied)
    own = {
        each.name: dict(zip(found.kind_names, each.kinds, strict=True)) for each in found.modules
    }
    assert own["words"]["parameters"] == own["words"]["gradients"] > 0
    assert own["head"]["parameters"] == own["head"]["gradients"] == 0


@every_case
@pytest.mark.usefixtures("few_sets")
def test_shares_add_up_to_the_peak(case: Callable[[], Case]) -> None:
    found, _ = explained(case)
    whole, *inner = found.modules
    assert whole.name == ""
    assert whole.at_peak == whole.highest == found.peak
    assert sum(each.at_peak for each in found.kinds) == found.peak
    assert sum(each.at_peak for each in found.ops) == found.peak - found.static_bytes
    direct = [each for each in inner if "." not in each.name]
    for k in range(len(found.kind_names)):
        assert sum(each.kinds[k] for each in direct) <= whole.kinds[k]
    assert max(point.nbytes for point in found.timeline) == found.peak
    assert found.timeline[-1].event == max(point.event for point in found.timeline)
    for point in found.timeline:
        assert sum(point.kinds) == point.nbytes


class Known(nn.Module):
    """A layer of which every byte is known."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@pytest.mark.usefixtures("few_sets")
def test_bytes_are_those_counted_by_hand() -> None:
    """Each layer saves the result of its `tanh`, which its successor's weight needs, too."""
    model, x = nn.Sequential(Known(), Known()), torch.randn(64, DIM)
    found = rekindle.explain(model, x, loss=lambda y: y.sum())
    one = 64 * DIM * 4
    weight = DIM * DIM * 4
    highest = {each.name: each.highest for each in found.kinds}
    assert highest["parameters"] == highest["gradients"] == 2 * weight
    assert highest["batch"] == one
    assert highest["activations"] == 2 * one + 4  # and the loss
    assert [(each.op, each.shape, each.count) for each in found.saved] == [("tanh", (64, DIM), 2)]
    assert found.saved[0].nbytes == 2 * one
    assert found.saved[0].needed_by == ("TanhBackward in *", "MmBackward in *.linear")
    assert found.source == "device"


@pytest.mark.usefixtures("few_sets")
def test_the_largest_module_is_the_one_that_made_most() -> None:
    found, _ = explained(gpt)
    blocks = [each for each in found.modules if each.name in ("blocks.0", "blocks.1", "blocks.2")]
    activations = found.kind_names.index("activations")
    assert len({each.kinds[activations] for each in blocks}) == 1
    assert {each.about for each in blocks} == {"GptBlock"}
