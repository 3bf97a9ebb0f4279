"""Plan and profile files: a damaged one is refused when it is read, by the place of the damage."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.planner import json_files, json_schema
from rekindle.planner.plan_for_budget import BudgetError, plain_prediction
from rekindle.planner.timeline import simulate
from rekindle.planner.types import BlockProfile, Candidate, Nearby
from rekindle.strategy import OpAddress, PlannedOps, SavedIndices, Selective
from tests.toys import Stack, gradients, same_bits

DATA = Path(__file__).parents[1] / "data"
Place = tuple[str | int, ...]
KINDS: dict[str, Callable[[Path], Any]] = {
    "plan": rekindle.Plan.load,
    "profile": rekindle.Profile.load,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def whole(kind: str, folder: Path) -> dict[str, Any]:
    """The JSON of a good file of this version."""
    path = folder / f"{kind}.json"
    KINDS[kind](DATA / f"{kind}-v4.json").save(path)
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every place in parsed JSON; of lists the first entry and the last."""
    if place:
        yield place
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*place, key))
    elif isinstance(value, list):
        for i in sorted({0, len(value) - 1}) if value else ():
            yield from places(value[i], (*place, i))


def put(values: Any, place: Place, new: Any) -> Any:
    """A copy with something else at a place."""
    changed = copy.deepcopy(values)
    at = changed
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = new
    return changed


def without(values: Any, place: Place) -> Any:
    changed = copy.deepcopy(values)
    at = changed
    for key in place[:-1]:
        at = at[key]
    del at[place[-1]]
    return changed


def damages(values: dict[str, Any], place: Place) -> Iterator[Any]:
    """The JSON with damage of several kinds at one place."""
    yield without(values, place)
    now: Any = values
    for key in place:
        now = now[key]
    others: list[Any] = [None, "abc", "", -1, -0.5, 0, 1.5, True, math.nan, math.inf, 10**400]
    others += [
        2**63,
        1e308,
        10**6,
        [],
        {},
        [[]],
        [None],
        ["abc"],
        [-1],
        {"a": 1},
        [now],
        [now, now],
    ]
    if isinstance(now, list):
        others += [now[:-1], [*now, *now[-1:]], [*now, None], now[::-1]]
    for other in others:
        yield put(values, place, other)


def use(kind: str, value: Any) -> None:
    """Whatever may be done with a value that was read; errors that say why are fine."""
    str(value)
    hash(value)
    if kind == "plan":
        model = Stack(3, 64)
        try:
            rekindle.apply(model, value)
        except ValueError:  # it is for another model
            return
        model(torch.randn(4, 64)).sum().backward()
        rekindle.remove(model)
    else:
        plain_prediction(value)
        try:
            rekindle.solve(value, "60%")
        except BudgetError:
            return


def short(place: Place) -> str:
    """A place as errors write it."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return text.removeprefix(".")


@every_kind
def test_a_damaged_file_is_refused_by_the_place_or_is_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    path = tmp_path / "damaged.json"
    good = whole(kind, tmp_path)
    for block in good["blocks"] if kind == "profile" else ():
        block["candidates"] = [*block["candidates"][:2], block["candidates"][-1]]
    text = [""]
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text[0])  # disks are slow
    refused: list[str] = []
    whole_ones: dict[Any, Any] = {}
    for place in places(good):
        for damaged in damages(good, place):
            text[0] = json.dumps(damaged)
            try:
                value = KINDS[kind](path)
            except ValueError as error:
                refused.append(str(error))
            else:  # of each field one: to use one takes longer than to read it
                whole_ones.setdefault([key for key in place if isinstance(key, str)][-1], value)
    assert all(error.startswith(str(path)) for error in refused)
    assert len(refused) > 1000
    assert len(whole_ones) > 10
    for value in whole_ones.values():
        use(kind, value)


@every_kind
def test_an_error_names_the_place_what_is_expected_and_what_is_found(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.json"
    good = whole(kind, tmp_path)
    for place in places(good):
        if place[0] in ("schema", "version"):
            continue
        path.write_text(json.dumps(put(good, place, {"no": "such"})))
        with pytest.raises(ValueError, match=r"should be .*, but is ") as error:
            KINDS[kind](path)
        assert f": {short(place)}" in str(error.value)


FIRST: Place = ("blocks", 0, "candidates", 0)
MOVES: Place = ("blocks", 0, "candidates", 6)
CASES: list[tuple[str, Place, Any, str]] = [
    ("profile", ("order", 1, 1), 7, r"order\[1\]: is block 7 of 2"),
    ("profile", ("order",), [], "order: should name a block"),
    ("profile", ("between",), [1], "between: should have 3 numbers"),
    ("profile", ("passed",), [0] * 4, "passed: should have 3 numbers"),
    ("profile", ("bytes_per_second",), 0.0, r"blocks\[0\].candidates\[5\].bytes_moved: cannot be"),
    ("profile", FIRST[:3], [], "candidates: should have one that is to keep, but 0 are"),
    ("profile", (*FIRST, "strategy"), {"strategy": "recompute"}, "one that is to keep, but 0 are"),
    (
        "profile",
        (*FIRST, "strategy"),
        {"strategy": "offload"},
        "strategy: should be one that a plan",
    ),
    ("profile", (*FIRST, "bytes_held"), -1, r"candidates\[0\].bytes_held should be a whole number"),
    ("profile", (*FIRST, "bytes_moved"), 1, "bytes_moved: should be 0 where the strategy is Keep"),
    ("profile", (*FIRST, "strategy", "kept"), [1], r"strategy\.kept should be no field"),
    (
        "profile",
        (*MOVES, "strategy", "offloaded"),
        [7, 7],
        "is there a second time",
    ),
    ("profile", (*MOVES, "strategy", "recomputed"), [7], "has 7, which is in offloaded"),
    ("profile", (*MOVES, "largest_moved"), 2**60, "more than is moved"),
    ("profile", ("unused",), ["a", "a"], r"unused\[1\]: names 'a' a second time"),
    ("profile", ("unused",), ["blocks.0"], r"unused\[0\]: names 'blocks.0' a second time"),
    ("plan", ("inputs",), ["abc"], r"inputs\[0\] should be a list, but is 'abc'"),
    ("plan", ("inputs",), [[1.5]], r"inputs\[0\]\[0\] should be a whole number"),
    ("plan", ("gap",), 2.0, "gap: should be a share"),
    ("plan", ("blocks",), [], "blocks: should name a block"),
    (
        "plan",
        ("blocks", 0),
        ["blocks.0", "Block"],
        r"blocks\[0\] should be a list of 3, but is one",
    ),
    ("plan", ("blocks", 0, 0), "blocks.1", r"blocks\[1\]"),
    ("plan", ("measured_time",), None, "measured_time: should be there if"),
    ("plan", ("budget",), 0, "budget: should be above 0"),
    ("plan", ("less", "seconds"), "soon", r"less.seconds should be a number from 0 to 1e18"),
]


@pytest.mark.parametrize(("kind", "place", "new", "match"), CASES)
def test_fields_that_do_not_agree_are_refused(
    kind: str, place: Place, new: Any, match: str, tmp_path: Path
) -> None:
    good = whole(kind, tmp_path)
    damaged = put(good, place, new)
    if match == r"blocks\[1\]":  # one path, two classes
        damaged = put(damaged, ("blocks", 0, 1), "Other")
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=match):
        KINDS[kind](path)


@every_kind
@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, b"\xff\xfe", '{"a": NaN}'])
def test_a_file_that_is_not_json_is_refused_as_such(
    kind: str, text: str | bytes, tmp_path: Path
) -> None:
    path = tmp_path / "deep.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"deep\.json is not JSON"):
        KINDS[kind](path)


@every_kind
def test_a_deep_value_in_a_field_is_refused(kind: str, tmp_path: Path) -> None:
    good = whole(kind, tmp_path)
    path = tmp_path / "deep.json"
    text = json.dumps({**good, "inputs": "HERE"})
    path.write_text(text.replace('"HERE"', "[" * 500 + "]" * 500))
    with pytest.raises(ValueError, match=r"deep\.json is not a whole"):
        KINDS[kind](path)


@every_kind
@pytest.mark.parametrize("version", [4, 5])
def test_a_file_of_an_older_version_is_read(kind: str, version: int, tmp_path: Path) -> None:
    old = DATA / f"{kind}-v{version}.json"
    assert json.loads(old.read_text())["version"] == version
    value = KINDS[kind](old)
    value.save(tmp_path / "new.json")
    assert KINDS[kind](tmp_path / "new.json") == value
    assert json.loads((tmp_path / "new.json").read_text())["version"] == json_files._VERSION


def test_a_profile_of_version_4_is_solved_as_it_was() -> None:
    pytest.importorskip("scipy")
    profile, plan = (KINDS[kind](DATA / f"{kind}-v4.json") for kind in ("profile", "plan"))
    assert profile.order == (("blocks.0", 0), ("blocks.1", 1), ("blocks.2", 1))
    assert plan.predicted_peak == 2_014_984
    again = rekindle.solve(profile, plan.budget)
    assert again.predicted_peak <= plan.budget
    assert rekindle.frontier(profile, 3)


V5_BLOCKS = """\
  blocks.0: 1 x Block: keep 2 results (addmm, layer_norm), recompute the rest: 644 KiB held, 1.49 ms
  blocks.1: 1 x Block: keep 1 result (layer_norm), spill 1 result (addmm), recompute the rest: \
260 KiB held, 256 KiB moved, 1.50 ms
  blocks.2: 1 x Block: recompute 1 result (gelu), spill 1 result (addmm), keep the rest: 260 KiB \
held, 256 KiB moved, 1.26 ms"""


def test_a_plan_of_version_5_prints_as_it_did() -> None:
    assert str(rekindle.Plan.load(DATA / "plan-v5.json")).endswith(V5_BLOCKS)


def test_options_of_version_5_are_strategies() -> None:
    strategies = [c.strategy for _, _, c in rekindle.Plan.load(DATA / "plan-v5.json").blocks]
    norm = OpAddress("norm", "aten::native_layer_norm", 0, 1)
    up = OpAddress("mlp.up", "aten::addmm", 0, 2)
    assert strategies == [
        Selective(PlannedOps((norm, up))),
        Selective(PlannedOps((norm,), (up,), "disk")),
        SavedIndices((8,), (7,), "disk", 10),
    ]


def test_a_profile_of_version_5_predicts_what_it_did() -> None:
    profile, plan = (KINDS[kind](DATA / f"{kind}-v5.json") for kind in ("profile", "plan"))
    found = simulate(profile, [candidate for _, _, candidate in plan.blocks])
    assert (found.peak, found.seconds) == (plan.predicted_peak, plan.predicted_time)


@pytest.mark.parametrize("version", [4, 5])
def test_a_plan_of_an_older_version_is_applied(version: int) -> None:
    plan = rekindle.Plan.load(DATA / f"plan-v{version}.json")
    model, x = Stack(3, 64), torch.randn(512, 64, requires_grad=True)
    leaves = [x, *model.parameters()]
    _, before, _ = gradients(lambda: model(x), leaves)
    rekindle.apply(model, plan)
    _, after, _ = gradients(lambda: model(x), leaves)
    assert all(map(same_bits, before, after))


def test_a_file_of_this_version_has_every_field(tmp_path: Path) -> None:
    good = whole("plan", tmp_path)
    for field in fields(rekindle.Plan):
        if field.name == "profile":  # files do not have it
            continue
        (tmp_path / "less.json").write_text(json.dumps(without(good, (field.name,))))
        with pytest.raises(ValueError, match=f"{field.name} should be a field, but is missing"):
            rekindle.Plan.load(tmp_path / "less.json")


def test_an_older_file_may_lack_fields_that_have_a_default(tmp_path: Path) -> None:
    values = json.loads((DATA / "plan-v4.json").read_text())
    (tmp_path / "less.json").write_text(json.dumps(without(values, ("unused",))))
    assert rekindle.Plan.load(tmp_path / "less.json").unused == ()
    (tmp_path / "less.json").write_text(json.dumps(without(values, ("budget",))))
    with pytest.raises(ValueError, match="budget should be a field, but is missing"):
        rekindle.Plan.load(tmp_path / "less.json")


@pytest.mark.parametrize("kind", [Candidate, BlockProfile, rekindle.Profile, rekindle.Plan, Nearby])
def test_the_schema_knows_the_type_of_every_field(kind: type) -> None:
    for name, (hint, _) in json_schema._fields(kind).items():
        with pytest.raises(ValueError, match=f"^{name}"):
            json_schema._value(hint, object(), name, False)


def test_a_field_that_is_added_is_checked_without_a_change_to_the_schema() -> None:
    @dataclass(frozen=True)
    class Later(Nearby):
        noise: float = 0.0
        notes: tuple[str, ...] = ()

    values = {"budget": 1, "seconds": None, "noise": 0.5, "notes": ["a"]}
    assert json_schema.build(Later, values) == Later(1, None, 0.5, ("a",))
    with pytest.raises(ValueError, match=r"notes\[0\] should be text, but is 3"):
        json_schema.build(Later, {**values, "notes": [3]})
