"""Profiles that are saved and read again."""

import json
from pathlib import Path

import pytest

import rekindle
from rekindle.planner.types import Candidate
from rekindle.strategy import Keep, NumberedOps, Recompute, Selective
from tests.planner.fake_cases import fake_stack_profile

pytest.importorskip("scipy")


SAVED = rekindle.Profile(
    model="Stack",
    device="H200",
    batch="float32[4, 8]",
    static_bytes=100,
    before_bytes=10,
    rest_peak=20,
    rest_seconds=0.125,
    bytes_per_second=5e10,
    blocks=(
        rekindle.planner.types.BlockProfile(
            "Block",
            "Block()",
            (
                Candidate(Keep()),
                Candidate(Recompute()),
                Candidate(Selective(NumberedOps((1, 3), (5,))), 40, 20, 0.1),
            ),
        ),
    ),
    order=(("blocks.0", 0), ("blocks.1", 0)),
)


def test_a_profile_that_is_read_again_is_the_same(tmp_path: Path) -> None:
    for profile in (SAVED, fake_stack_profile()):
        profile.save(tmp_path / "profile.json")
        again = rekindle.Profile.load(tmp_path / "profile.json")
        assert again == profile
        assert hash(again) == hash(profile)
        assert json.dumps(again.as_json()) == json.dumps(profile.as_json())


def test_a_profile_that_was_saved_has_the_same_plans(tmp_path: Path) -> None:
    profile = fake_stack_profile()
    profile.save(str(tmp_path / "profile.json"))
    again = rekindle.Profile.load(str(tmp_path / "profile.json"))
    assert rekindle.solve(again, "60%") == rekindle.solve(profile, "60%")


def test_a_saved_profile_is_json_with_its_schema_and_fields(tmp_path: Path) -> None:
    SAVED.save(tmp_path / "profile.json")
    values = json.loads((tmp_path / "profile.json").read_text())
    assert (values["schema"], values["version"]) == ("rekindle profile", 11)
    assert values.keys() - {"schema", "version"} == vars(SAVED).keys()


def test_a_plan_is_no_profile_and_a_profile_no_plan(tmp_path: Path) -> None:
    SAVED.save(tmp_path / "profile.json")
    with pytest.raises(ValueError, match=r"profile\.json is not a plan of rekindle's"):
        rekindle.Plan.load(tmp_path / "profile.json")
    profile = fake_stack_profile()
    rekindle.solve(profile, "60%").save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json is not a profile of rekindle's"):
        rekindle.Profile.load(tmp_path / "plan.json")


@pytest.mark.parametrize("field", ["blocks", "order", "static_bytes"])
def test_a_profile_without_one_of_its_fields_is_refused_with_its_name(
    field: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    SAVED.save(path)
    values = json.loads(path.read_text())
    del values[field]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"not a whole profile.*{field}"):
        rekindle.Profile.load(path)
