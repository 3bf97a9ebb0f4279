"""The document of a page: exact values, each of them once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.planner.timeline import simulate
from rekindle.report.page.html import as_script_data, page_html
from tests.report.cases import GIB, MIB, explanation, frontier, mixed_plan, profile_of

pytest.importorskip("scipy")


def document_of(path: Path) -> dict[str, Any]:
    """The JSON that is in a page."""
    _, _, rest = path.read_text(encoding="utf-8").partition('id="document">')
    found: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return found


@pytest.fixture(scope="module")
def of_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    assert mixed_plan().report(path, points=4) == path
    return document_of(path)


@pytest.fixture(scope="module")
def of_frontier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("page") / "frontier.html"
    return document_of(frontier().report(path, others={"torch": (12 * GIB, 0.34)}))


@pytest.fixture(scope="module")
def of_explanation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("page") / "explanation.html"
    return document_of(explanation().report(path, points=2))


def test_the_stops_are_the_points_of_the_frontier_from_the_lowest_peak_up(
    of_frontier: dict[str, Any],
) -> None:
    found = [(stop["peak"], stop["seconds"]) for stop in of_frontier["plans"]["stops"]]
    assert found == [(point.peak, point.seconds) for point in reversed(frontier())]


def test_the_candidates_of_a_stop_are_those_of_its_plan(of_frontier: dict[str, Any]) -> None:
    plans = of_frontier["plans"]
    for stop, point in zip(plans["stops"], reversed(frontier()), strict=True):
        texts = [plans["candidates"][index]["text"] for index in stop["choice"]]
        assert texts == [candidate.describe() for _, _, candidate in point.plan.blocks]


def test_memory_at_the_moments_adds_up_to_the_predicted_peak(of_frontier: dict[str, Any]) -> None:
    plans = of_frontier["plans"]
    for stop in plans["stops"]:
        memory = [plans["columns"][index] for index in stop["step"]["memory"]]
        totals = [plans["static"] + sum(causes) for causes in zip(*memory, strict=True)]
        assert max(totals) == stop["peak"] == totals[stop["step"]["peak_moment"]]
        assert plans["moments"][stop["step"]["peak_moment"]]["at"] == stop["peak_at"]


def test_columns_that_are_alike_are_there_once(of_frontier: dict[str, Any]) -> None:
    columns = [tuple(column) for column in of_frontier["plans"]["columns"]]
    assert len(columns) == len(set(columns))


def test_candidates_that_are_alike_are_there_once(of_plan: dict[str, Any]) -> None:
    candidates = [json.dumps(each) for each in of_plan["plans"]["candidates"]]
    assert len(candidates) == len(set(candidates))


def test_every_kind_of_strategy_has_its_words_and_bytes(of_plan: dict[str, Any]) -> None:
    plans = of_plan["plans"]
    mine = next(stop for stop in plans["stops"] if "your plan" in stop["labels"])
    chosen = [plans["candidates"][index] for index in mine["choice"][:6]]
    assert [each["words"] for each in chosen] == [
        ["keep"],
        ["recompute"],
        ["keep", "recompute"],
        ["keep", "offload"],
        ["keep", "recompute"],
        ["keep", "spill"],
    ]
    assert [(each["held"], each["moved"], each["remade"]) for each in chosen] == [
        (900 * MIB, 0, 0),
        (50 * MIB, 0, 850 * MIB),
        (600 * MIB, 0, 300 * MIB),
        (400 * MIB, 500 * MIB, 0),
        (300 * MIB, 0, 600 * MIB),
        (400 * MIB, 500 * MIB, 0),
    ]
    assert mine["moved"] == 1000 * MIB


def test_the_code_is_that_of_the_budget_and_the_loss(of_frontier: dict[str, Any]) -> None:
    plans = of_frontier["plans"]
    assert plans["stops"][-1]["code"] == (
        'plan = rekindle.fit(model, batch, budget="16.1GiB", loss=loss)'
    )


def test_the_plan_of_a_report_is_shown_first_with_its_own_budget(tmp_path: Path) -> None:
    plan = replace(frontier()[3].plan, budget=13 * GIB + GIB // 2).measured(13 * GIB, 0.31)
    plans = document_of(plan.report(tmp_path / "plan.html", points=8))["plans"]
    stop = plans["stops"][plans["chosen"]]
    assert (stop["labels"], stop["budget"]) == (["your plan"], plan.budget)
    assert stop["measured"] == {"peak": 13 * GIB, "seconds": 0.31}
    assert len(plans["stops"]) == len(frontier())
    assert plans["stops"][plans["plain"]]["labels"] == ["no plan"]


def test_a_profile_that_does_not_fit_its_device_is_shown_with_the_plan_that_does(
    tmp_path: Path,
) -> None:
    profile = profile_of(device="NVIDIA Tesla T4")
    plans = document_of(profile.report(tmp_path / "profile.html", points=2))["plans"]
    stop = plans["stops"][plans["chosen"]]
    room = 16 * GIB - 16 * GIB // 20
    assert stop["labels"] == ["for the device"]
    assert (stop["budget"], stop["peak"] <= room) == (room, True)


def test_recomputing_every_block_is_drawn_beside_what_was_given(
    of_frontier: dict[str, Any],
) -> None:
    profile = profile_of()
    recompute = simulate(profile, [profile.candidates(0)[1]] * 8)
    assert of_frontier["plans"]["others"] == [
        {"name": "every block recomputed", "peak": recompute.peak, "seconds": recompute.seconds},
        {"name": "torch", "peak": 12 * GIB, "seconds": 0.34},
    ]


def test_a_plan_without_its_profile_has_one_stop_and_no_moments(tmp_path: Path) -> None:
    mixed_plan().save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    plans = document_of(loaded.report(tmp_path / "plan.html"))["plans"]
    assert [stop["step"] for stop in plans["stops"]] == [None]
    assert plans["moments"] == []


def test_a_loaded_plan_takes_a_profile(tmp_path: Path) -> None:
    frontier()[2].plan.save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    path = loaded.report(tmp_path / "plan.html", profile=profile_of(), points=3)
    stops = document_of(path)["plans"]["stops"]
    assert len(stops) > 1
    assert all(stop["step"] for stop in stops)


def test_a_loaded_plan_without_a_profile_makes_no_snapshot(tmp_path: Path) -> None:
    mixed_plan().save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"loaded without its profile.*profile=rekindle"):
        loaded.report(tmp_path / "plan.html", snapshot=tmp_path / "plan.pickle")


def test_plans_that_are_solved_for_have_their_profile() -> None:
    profile = profile_of()
    assert rekindle.solve(profile, "12GiB").profile is profile
    assert all(point.plan.profile == profile for point in frontier())


def test_a_page_needs_no_scipy_where_there_is_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = mixed_plan()
    monkeypatch.setattr("rekindle.report.page.write.find_spec", lambda name: None)
    stops = document_of(plan.report(tmp_path / "plan.html"))["plans"]["stops"]
    assert [stop["labels"] for stop in stops] == [["your plan"], ["no plan"]]
    assert all(stop["step"] for stop in stops)


def test_shares_of_an_explanation_are_its_bytes(of_explanation: dict[str, Any]) -> None:
    found, values = explanation(), of_explanation["explanation"]
    for name, shares in (("module", found.modules), ("op", found.ops), ("line", found.lines)):
        expected = [(s.name, s.at_peak) for s in shares if s.highest]
        rows = values["shares"][name]
        assert [(values["names"][row[0]], row[2]) for row in rows] == expected
        assert all(sum(nbytes for _, nbytes in row[4]) == row[2] for row in rows)


def test_groups_of_modules_add_up_to_the_peak(of_explanation: dict[str, Any]) -> None:
    values = of_explanation["explanation"]
    assert sum(row[2] for row in values["shares"]["group"]) == explanation().peak == values["peak"]


def test_the_timeline_of_an_explanation_is_that_of_the_step(of_explanation: dict[str, Any]) -> None:
    found, values = explanation(), of_explanation["explanation"]
    totals = [sum(nbytes for _, nbytes in point[5]) for point in values["timeline"]]
    assert totals == [point.nbytes for point in found.timeline]
    modules = [values["names"][point[3]] for point in values["timeline"]]
    assert modules == [point.module for point in found.timeline]


def test_saved_tensors_and_changes_are_those_of_the_explanation(
    of_explanation: dict[str, Any],
) -> None:
    found, values = explanation(), of_explanation["explanation"]
    assert [each["bytes"] for each in values["saved"]] == [each.nbytes for each in found.saved]
    assert [each["how"] for each in values["changes"]] == [each.how for each in found.changes]


def test_an_explanation_brings_its_plans(of_explanation: dict[str, Any]) -> None:
    assert of_explanation["first"] == "explanation"
    stops = of_explanation["plans"]["stops"]
    assert stops[-1]["labels"] == ["no plan"]
    assert len(stops) == 2


def test_a_loaded_explanation_has_no_plans(tmp_path: Path) -> None:
    explanation().save(tmp_path / "found.json")
    loaded = rekindle.Explanation.load(tmp_path / "found.json")
    values = document_of(loaded.report(tmp_path / "page.html"))
    assert values["plans"] is None
    assert values["explanation"]["peak"] == explanation().peak


@pytest.mark.parametrize("text", ["</script>", "<!--", "[[script]]", "\u2028", "é", '"'])
def test_any_text_can_stand_in_the_document(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page_html({"model": text, "device": text}), "utf-8")
    assert document_of(tmp_path / "page.html")["model"] == text
    assert "<" not in as_script_data({"model": text})


def large_page(path: Path) -> int:
    """Bytes of a page of 128 layers, each block of each plan of a kind of its own."""
    profile = profile_of(128)
    menu = profile.blocks[0].candidates
    base, points = frontier()[0].plan, []
    for i in range(14):
        blocks = tuple(
            (name, "Layer", replace(menu[3], bytes_held=(i * 128 + j) * MIB + j * 7919))
            for j, (name, _) in enumerate(profile.order)
        )
        plan = replace(base, blocks=blocks, profile=profile, predicted_peak=(90 - i) * GIB)
        points.append(rekindle.Point(plan.predicted_peak, 1.0 + i, plan))
    found = explanation()
    modules = tuple(
        replace(share, name=f"model.layers.{i}.{share.name}")
        for i in range(128)
        for share in found.modules[1:14]
    )
    deep = replace(found, modules=(found.modules[0], *modules), profile=None, allocations=())
    return rekindle.Frontier(tuple(points)).report(path, explanation=deep).stat().st_size


def test_a_page_of_128_layers_is_smaller_than_a_mebibyte(tmp_path: Path) -> None:
    """Contrived: no two blocks of any two plans have the same candidate, or the same moments."""
    assert large_page(tmp_path / "page.html") < MIB


def test_a_folder_that_is_not_there_is_said_before_plans_are_solved_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*missing to write"):
        profile_of().report(tmp_path / "missing" / "page.html")


@pytest.mark.parametrize("points", [0, True, 2.5])
def test_points_are_a_whole_number(points: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="points should be a whole number from 1 on"):
        profile_of().report(tmp_path / "page.html", points=points)
