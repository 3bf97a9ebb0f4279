"""Snapshots: what torch's own functions, and its page, make of them."""

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

import rekindle
from rekindle.report.snapshot import snapshot_of_explanation, snapshot_of_plan
from tests.planner.random_profiles import random_profile
from tests.report.cases import explanation

pytest.importorskip("scipy")

READ_BY_TORCHS_PAGE = """
APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT EMPTY_LIST
EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE NEWTRUE NONE PROTO
SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3
"""
"""Opcodes of pickle that `torch/utils/viz/MemoryViz.js` knows; it refuses a file with others."""


def highest(snapshot: dict[str, Any]) -> int:
    """The most bytes at once, by the events and what was there before them."""
    events = snapshot["device_traces"][0]
    change = {"alloc": 1, "free_requested": 0, "free_completed": -1}
    changes = [change[event["action"]] * event["size"] for event in events]
    alive = sum(segment["requested_size"] for segment in snapshot["segments"])
    now = most = alive - sum(changes)
    for each in changes:
        now += each
        most = max(most, now)
    return most


def snapshots() -> list[dict[str, Any]]:
    profile = random_profile(3, blocks=6)
    plan = rekindle.frontier(profile, 3)[1].plan
    return [snapshot_of_explanation(explanation()), snapshot_of_plan(profile, plan)]


def test_the_storages_of_a_step_peak_where_the_explanation_does() -> None:
    assert highest(snapshot_of_explanation(explanation())) == explanation().peak


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_peaks_where_it_is_predicted_to(seed: int) -> None:
    profile = random_profile(seed, blocks=6)
    for point in rekindle.frontier(profile, 4):
        assert highest(snapshot_of_plan(profile, point.plan)) == point.peak


def test_torch_sums_up_the_segments() -> None:
    for snapshot in snapshots():
        assert "segments: 1" in _memory_viz.segsum(snapshot)


def test_torch_lists_every_event() -> None:
    for snapshot in snapshots():
        count = len(snapshot["device_traces"][0])
        assert f"{count} entries" in _memory_viz.trace(snapshot)


def test_torch_draws_a_flame_graph_of_lines_and_ops() -> None:
    snapshot = snapshot_of_explanation(explanation())
    found = _memory_viz.memory(snapshot, format_flamegraph=lambda lines: lines)
    assert "parameters, gradients, optimizer, batch" in found
    frames = [frame for event in snapshot["device_traces"][0] for frame in event["frames"]]
    assert "attention in forward" in {frame["name"] for frame in frames}
    own = next(frame for frame in frames if frame["name"] == "GptBlock.forward")
    assert own["filename"].endswith("tests/explanation/models.py")
    assert own["line"] > 0


def test_torch_makes_a_page_of_the_trace() -> None:
    for snapshot in snapshots():
        assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)


def test_the_file_has_no_opcode_that_torchs_page_does_not_read(tmp_path: Path) -> None:
    explanation().report(tmp_path / "page.html", snapshot=tmp_path / "step.pickle", points=2)
    content = (tmp_path / "step.pickle").read_bytes()
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(content)}
    assert opcodes <= set(READ_BY_TORCHS_PAGE.split())
    assert content[1] == 4  # of torch's page, the highest protocol
    assert pickle.loads(content) == snapshot_of_explanation(explanation())


def test_every_block_is_in_the_segment() -> None:
    for snapshot in snapshots():
        (segment,) = snapshot["segments"]
        begin, end = segment["address"], segment["address"] + segment["total_size"]
        events = snapshot["device_traces"][0]
        assert all(begin <= e["addr"] and e["addr"] + e["size"] <= end for e in events)
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_no_two_storages_overlap() -> None:
    for snapshot in snapshots():
        alive: dict[int, int] = {}
        for event in snapshot["device_traces"][0]:
            if event["action"] == "alloc":
                alive[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                del alive[event["addr"]]
            places = sorted(alive.items())
            ends = [address + size for address, size in places]
            assert all(end <= begin for end, (begin, _) in zip(ends, places[1:], strict=False))


def test_a_loaded_explanation_has_no_storages_for_a_snapshot(tmp_path: Path) -> None:
    explanation().save(tmp_path / "found.json")
    loaded = rekindle.Explanation.load(tmp_path / "found.json")
    with pytest.raises(ValueError, match="has no single storages"):
        loaded.report(tmp_path / "page.html", snapshot=tmp_path / "step.pickle")
