"""`rekindle.largest`: the largest size that fits, its plan, and the throughput of sizes tried."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.devices import usable_bytes
from rekindle.planner.plan import Plan
from tests.planner.cases import unchanged

pytest.importorskip("scipy")

DIM = 64
BUDGET = 2**20


def rows(size: int) -> Tensor:
    return torch.empty(size, DIM, device="meta")


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def stack(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*[block() for _ in range(3)])


def largest(
    make_batch: Callable[[int], Any] = rows, model: nn.Module | None = None, **options: Any
) -> rekindle.Largest:
    given: dict[str, Any] = {"budget": BUDGET, "device": "RTX 4090", "loss": loss}
    return rekindle.largest(model or stack(), make_batch, **given | options)


@cache
def found() -> rekindle.Largest:
    return largest(multiple_of=8)


def test_the_answer_is_exact_among_the_multiples() -> None:
    assert (found().size, found().multiple_of, found().capped) == (40, 8, False)
    assert [each.size for each in found().tried] == [8, 16, 40, 48]
    assert [each.fits for each in found().tried] == [True, True, True, False]


def test_a_profile_of_the_answer_has_a_plan_and_the_next_has_none() -> None:
    model = stack()

    def solve(size: int) -> Plan:
        options: dict[str, Any] = {"device": "meta", "like": "RTX 4090", "loss": loss}
        return rekindle.solve(rekindle.profile(model, rows(size), **options), BUDGET)

    assert solve(40) == found().plan
    with pytest.raises(rekindle.BudgetError):
        solve(48)


def test_the_size_that_does_not_fit_has_the_least_peak_of_all_plans() -> None:
    more = found().tried[-1]
    assert (more.plan, more.seconds, more.per_second) == (None, None, 0.0)
    assert more.peak is not None
    assert more.peak > BUDGET


def test_throughput_is_items_by_the_time_of_the_plan() -> None:
    first = found().tried[0]
    assert first.plan is not None
    assert (first.items, first.seconds) == (8, first.plan.predicted_time)
    assert first.per_second == 8 / first.plan.predicted_time
    assert found().best == max(found().tried, key=lambda each: each.per_second)


def test_the_best_throughput_may_be_at_a_size_that_needs_no_plan() -> None:
    slow = rekindle.Device("slow", 1e9, 1e9, 1e9, 1e9, 0.0, memory_bytes=2**20, launch=0.0)
    options: dict[str, Any] = {"device": slow, "multiple_of": 8, "budget": BUDGET}
    best = largest(**options).best
    assert (best.size, best.plan is not None and best.plan.keeps_all) == (16, True)


def test_tokens_of_a_sequence_are_those_of_all_samples() -> None:
    tried = largest(lambda size: torch.empty(2, size, DIM, device="meta"), over="sequence", most=4)
    assert (tried.over, tried.unit, tried.size, tried.largest.items) == (
        "sequence",
        "tokens",
        4,
        8,
    )


def test_tokens_of_a_batch_of_ids_are_its_elements() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, DIM), stack())
    ids = largest(lambda size: torch.zeros(size, 4, dtype=torch.long), model, most=2)
    assert (ids.unit, ids.size, ids.largest.items) == ("tokens", 2, 8)


def test_the_largest_that_was_allowed_says_so() -> None:
    allowed = largest(multiple_of=8, most=23)
    assert (allowed.size, allowed.capped) == (16, True)
    assert "16, the most that was allowed" in str(allowed)


def test_without_a_budget_the_device_says_what_there_is() -> None:
    assert largest(budget=None, most=1).budget == usable_bytes(24 * 2**30)
    assert usable_bytes(100) == 95


def test_like_names_the_device_as_elsewhere() -> None:
    by_like = largest(device=None, like="RTX 4090", most=1)
    assert by_like == largest(device="meta", like="RTX 4090", most=1)
    assert by_like.device == "RTX 4090"


def test_the_model_ends_as_it_was() -> None:
    model = stack("cpu")
    model(torch.ones(2, DIM)).sum().backward()
    with unchanged(model):
        largest(model=model, multiple_of=8, most=16)


def test_measured_sizes_have_the_bytes_of_the_device() -> None:
    options: dict[str, Any] = {"device": None, "multiple_of": 8}
    measured = largest(lambda size: torch.ones(size, DIM), stack("cpu"), measure=True, **options)
    assert (measured.device, measured.size) == ("cpu", 40)


def test_a_size_that_runs_out_of_memory_does_not_fit() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = stack("cpu")

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise torch.OutOfMemoryError("no memory left")
            return self.blocks(x)

    options: dict[str, Any] = {"measure": True, "device": None, "budget": "1GiB"}
    small = largest(lambda size: torch.ones(size, DIM), Small(), **options)
    assert small.size == 2
    assert {each.peak for each in small.tried if not each.fits} == {None}
    assert "out of memory" in str(small)


def test_where_nothing_fits_the_error_says_what_the_least_takes() -> None:
    with pytest.raises(
        rekindle.BudgetError, match=r"A batch of 1 does not fit\. No plan fits into"
    ):
        largest(budget="100KiB")


def test_a_batch_that_ignores_its_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.planner.find_largest._MOST_UNITS", 2)
    with pytest.raises(ValueError, match="does make_batch use its size"):
        largest(lambda size: rows(1))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"make_batch": rows(1)}, TypeError, "make_batch should be a function of the size"),
        ({"over": "layers"}, ValueError, "over should be"),
        ({"multiple_of": 0}, ValueError, "multiple_of should be a whole number"),
        ({"most": True}, ValueError, "most should be a whole number"),
        ({"multiple_of": 8, "most": 7}, ValueError, "leaves nothing to try"),
        ({"budget": "40%"}, ValueError, "share is of one step"),
        ({"like": "H100"}, ValueError, "both name a device"),
        ({"device": 3}, TypeError, "name of a device"),
        ({"device": "RTX 1"}, ValueError, "no device 'RTX 1'"),
        ({"measure": True}, ValueError, "without device="),
        ({"measure": True, "device": None}, ValueError, "has no memory"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        largest(**options)


def test_a_cpu_has_no_memory_of_its_own_to_go_by() -> None:
    with pytest.raises(ValueError, match="budget= says how much memory"):
        largest(model=stack("cpu"), measure=True, device=None, budget=None)


def test_it_is_read_as_it_was_saved(tmp_path: Path) -> None:
    found().save(tmp_path / "largest.json")
    assert rekindle.Largest.load(tmp_path / "largest.json") == found()
    assert json.loads((tmp_path / "largest.json").read_text()) == found().as_json()


def test_a_file_whose_answer_was_not_tried_is_refused(tmp_path: Path) -> None:
    values = {**found().as_json(), "size": 41}
    (tmp_path / "largest.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="size: should be one that was tried and fits"):
        rekindle.Largest.load(tmp_path / "largest.json")


def test_columns_are_those_of_a_data_frame() -> None:
    columns = found().as_dict()
    assert columns["size"] == [8, 16, 40, 48]
    assert columns["seconds"][-1] is None
    assert {len(column) for column in columns.values()} == {4}


def test_it_prints_as_a_table_of_the_sizes() -> None:
    lines = str(found()).splitlines()
    assert lines[0].startswith("Largest batch of Sequential on RTX 4090 within 1 MiB: 40; at best ")
    assert lines[1].split() == ["batch", "peak", "time", "vs", "plain", "samples/s", "blocks"]
    assert [line.split()[0] for line in lines[2:]] == ["8", "16", "40", "48"]
    assert lines[-1].endswith("does not fit")
    assert len(lines[-2].split("largest, best throughput: ")) == 2
    assert repr(found()) == "<Largest batch of Sequential on RTX 4090 within 1 MiB: 40>"
    assert repr(found().largest) == "<TriedSize 40: fits>"


def test_a_notebook_shows_the_table() -> None:
    html = found()._repr_html_()
    assert html.count("<tr>") == 5
    assert "<td>40</td>" in html
