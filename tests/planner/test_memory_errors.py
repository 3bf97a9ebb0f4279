"""Memory that runs out under a plan: the error stays what it is, and says what was foreseen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner import oom_notes
from rekindle.planner.types import Candidate
from rekindle.sizes import format_bytes
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective
from tests.planner.test_plan import plan_of
from tests.toys import Mlp, Stack

KEEP = Candidate(Keep())
DROP = Candidate(Recompute())
SOME = Candidate(Selective(NumberedOps()))
WAYS = {"keep": KEEP, "recompute": DROP, "select": SOME}
every_way = pytest.mark.parametrize("option", WAYS.values(), ids=WAYS)
every_replay = pytest.mark.parametrize("option", [DROP, SOME], ids=["recompute", "select"])


class Full(torch.autograd.Function):
    """An op for which there is no memory, in forward or in a replay or in backward."""

    when: str | None = None
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Full.calls += 1
        if Full.when == "forward" or (Full.when == "replay" and Full.calls > 1):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB. There is no room.")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if Full.when == "backward":
            raise torch.OutOfMemoryError("There is no room.")
        return grads[0]


class Filling(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        full: Tensor = Full.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return full.sin()


def planned(option: Candidate, **more: Any) -> Stack:
    model = Stack(3)
    model.blocks[1].mlp = Filling()
    rekindle.apply(model, plan_of(option, option, option, **more))
    return model


@pytest.fixture(autouse=True)
def room() -> Any:
    yield
    Full.when, Full.calls = None, 0


def failed(model: nn.Module, when: str, x: Tensor | None = None) -> torch.OutOfMemoryError:
    Full.when, Full.calls = when, 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.ones(4, 8) if x is None else x).sum().backward()
    assert type(caught.value) is torch.OutOfMemoryError
    return caught.value


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


FORESEEN = "rekindle: the plan foresaw a peak of 2 MiB, within a budget of 3 MiB."


@every_way
def test_an_error_in_forward_names_what_was_foreseen(option: Candidate) -> None:
    (note,) = notes(failed(planned(option), "forward"))
    assert note.startswith(FORESEEN)


def test_an_error_in_a_replay_names_what_was_foreseen() -> None:
    (note,) = notes(failed(planned(DROP), "replay"))
    assert note.startswith(FORESEEN)


def test_an_error_in_an_op_that_is_made_again_names_what_was_foreseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("There is no room.")

    model = planned(SOME)
    out = model(torch.ones(4, 8)).sum()
    monkeypatch.setattr("rekindle.regions.selective.selective_region.remake", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        out.backward()
    (note,) = notes(caught.value)
    assert note.startswith(FORESEEN)


def test_an_error_elsewhere_in_backward_is_left_as_it_is() -> None:
    """Nobody of ours is on the stack there."""
    assert notes(failed(planned(KEEP), "backward")) == []


def test_without_a_plan_an_error_is_left_as_it_is() -> None:
    model = planned(DROP)
    rekindle.apply(model, "recompute")
    assert notes(failed(model, "replay")) == []
    rekindle.remove(model)
    assert notes(failed(model, "forward")) == []


def test_parts_that_are_called_without_the_model_name_it_too() -> None:
    (note,) = notes(failed(planned(DROP).blocks[1], "forward"))
    assert note.startswith(FORESEEN)
    assert notes(failed(planned(KEEP).blocks[1], "forward")) == []  # it is left as it is


def test_what_was_measured_is_named() -> None:
    model = planned(DROP, measured_peak=5 * 2**19, measured_time=0.1)
    (note,) = notes(failed(model, "replay"))
    assert "a peak of 2 MiB, measured as 2.5 MiB when it was made, within" in note


def test_a_call_that_was_larger_is_named() -> None:
    model = planned(DROP, inputs=((4, 8),))
    (note,) = notes(failed(model, "replay", torch.ones(6, 8)))
    assert "the plan for [4, 8] foresaw" in note
    assert "The model was called with [6, 8], larger than that." in note
    (note,) = notes(failed(model, "replay", torch.ones(4, 8)))
    assert "larger than that" not in note


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (5 * 2**20, "When memory ran out, 5 MiB were wanted: 3 MiB more than foreseen."),
        (2**20, "1 MiB were wanted: no more than foreseen, so the device has less room"),
    ],
)
def test_the_excess_is_named(wanted: int, said: str) -> None:
    assert said in oom_notes.format_oom_note(plan_of(DROP), wanted)


def test_what_was_asked_for_is_part_of_what_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrived: a device that says how much is in use."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2**20)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")
    assert oom_notes.bytes_wanted(error, torch.device("cuda")) == 3 * 2**20
    assert oom_notes.bytes_wanted(torch.OutOfMemoryError("no"), torch.device("cuda")) == 2**20
    assert oom_notes.bytes_wanted(error, torch.device("cpu")) is None


def test_after_an_error_the_model_trains_on() -> None:
    model = planned(DROP)
    failed(model, "replay")
    failed(model, "forward")
    Full.when = None
    with rekindle.observe() as seen:
        model(torch.ones(4, 8)).sum().backward()
    assert (seen.total.forwards, seen.total.replays) == (3, 3)


def test_an_error_while_a_larger_call_is_planned_for_says_so() -> None:
    pytest.importorskip("scipy")
    model = Stack(3)
    model.blocks[1].mlp = Filling()
    plan = rekindle.fit(model, torch.ones(4, 8), "1GiB")
    (note,) = notes(failed(model, "forward", torch.ones(9, 8)))
    assert f"the plan for [4, 8] foresaw a peak of {format_bytes(plan.predicted_peak)}" in note
    assert "called with [9, 8], larger than that" in note
    assert rekindle.plan_of(model) is plan
