"""Ranks that plan together agree on budgets, profiles and plans, and raise the same errors."""

from typing import Any

import pytest
import torch.distributed as dist

from tests.planner.ranks.error_cases import ERRORS
from tests.planner.ranks.rank_sync_worker import WORLDS
from tests.ranks import RankResults, results_of_worker

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """All cases of both worlds, in one go."""
    pytest.importorskip("scipy")
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_worker("tests.planner.ranks.rank_sync_worker", folder, WORLDS)


def assert_one_plan(found: list[dict[str, Any]]) -> None:
    """All ranks have one plan, which fits and has the gradients of a plain step."""
    assert [rank["same"] for rank in found] == [True] * len(found)
    assert [rank["plan"]["fits"] for rank in found] == [True] * len(found)
    assert [rank["plan"] for rank in found] == [found[0]["plan"]] * len(found)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_the_smallest_of_budgets_that_differ_by_rank_counts(
    kind: str, results: RankResults
) -> None:
    found = results.of(f"budgets: {kind}")
    assert_one_plan(found)
    assert [rank["smallest"] for rank in found] == [True, True]


def test_the_smallest_of_four_budgets_counts(results: RankResults) -> None:
    found = results.of("budgets: ddp", 4)
    assert_one_plan(found)
    assert [rank["smallest"] for rank in found] == [True] * 4


def test_a_share_on_one_rank_and_bytes_on_another_are_compared(results: RankResults) -> None:
    assert_one_plan(results.of("budgets: share and bytes"))


def test_ranks_have_one_plan_whatever_the_solver_finds_on_each(results: RankResults) -> None:
    assert_one_plan(results.of("solver"))


def test_solve_and_frontier_with_a_group_are_the_same_on_all_ranks(results: RankResults) -> None:
    first, second = results.of("solved together")
    assert first == second
    assert first["profiles"]
    assert first["budget"]


def test_the_profile_is_that_of_the_rank_with_the_largest_batch(results: RankResults) -> None:
    first, second = results.of("batches")
    assert_one_plan([first, second])
    assert first["held"] == second["held"] == second["own"] == 2 * first["own"]
    assert first["inputs"] == second["inputs"] == ((1024, 16),)
    assert (first["batch"], second["batch"]) == ("float32[512, 16]", "float32[1024, 16]")


ERROR_TEXTS = {
    "budget": ("ValueError", "On rank 1: budget should be like"),
    "too small": ("BudgetError", "No plan fits into"),
    "loss": ("ZeroDivisionError", "On rank 1: a loss that fails"),
    "odd error": ("OwnError", "On rank 1: 1 and 2"),
    "model": ("TypeError", "On rank 1: profile() takes a model, but got int"),
    "options": ("ValueError", "Ranks of one group differ in verify: rank 0 has 'auto', rank 1 has"),
    "batch": ("RuntimeError", "On rank 1: Given normalized_shape=[16]"),
    "profile": ("ZeroDivisionError", "On rank 1: a loss that fails"),
    "alone": ("IndexError", "On rank 1: a block that fails"),
    "models": ("ValueError", "Ranks that plan together have to have the same model"),
    "in a collective": ("IndexError", "On rank 1: a block that fails"),
}


@pytest.mark.parametrize("what", [*ERRORS, "in a collective"])
def test_an_error_on_one_rank_is_raised_on_all(what: str, results: RankResults) -> None:
    """And the next call works."""
    first, second = results.of(f"error: {what}")
    assert first["raised"] == second["raised"]
    kind, text = ERROR_TEXTS[what]
    assert first["raised"]["type"] == kind
    assert first["raised"]["text"].startswith(text)
    assert first["then"]
    assert second["then"]


@pytest.mark.parametrize("what", ERRORS)
def test_an_error_on_another_rank_leaves_nothing_behind(what: str, results: RankResults) -> None:
    for rank in results.of(f"error: {what}"):
        assert rank["left"] == {"hooks": 0, "plan": True}


def test_a_rank_that_makes_a_collective_call_alone_hears_who_is_missing(
    results: RankResults,
) -> None:
    """And may call again, alone in a group of its own, or with the others."""
    first, second = results.of("missing")
    assert first["raised"]["type"] == "RekindleError"
    assert "profile() is a collective call" in first["raised"]["text"]
    assert "but rank 1 did not within" in first["raised"]["text"]
    assert first["then"]
    assert second["then"]


def test_ranks_that_make_different_calls_raise_an_error(results: RankResults) -> None:
    first, second = (rank["raised"]["text"] for rank in results.of("other call"))
    assert first.endswith("but rank 1 called profile()")
    assert second.endswith("but rank 0 called fit()")


def test_ranks_that_run_different_blocks_have_one_plan_for_all_blocks(results: RankResults) -> None:
    found = results.of("skipped")
    assert_one_plan(found)
    assert [path for path, _ in found[0]["plan"]["blocks"]] == [f"blocks.{i}" for i in range(4)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_expert_without_tokens_on_one_rank_is_planned_for(
    kind: str, results: RankResults
) -> None:
    found = results.of(f"experts: {kind}")
    assert [(rank["same"], rank["fits"]) for rank in found] == [(True, True)] * 2
    assert found[0]["blocks"] == found[1]["blocks"]
    assert found[0]["strategies"] == found[1]["strategies"]


def test_a_plan_names_the_ops_that_its_own_rank_runs(results: RankResults) -> None:
    """Of one kind of op, one rank runs more than the other; both have options that go op by op."""
    first, second = results.of("experts: ddp")
    assert "Selective" in first["strategies"]
    assert first["counts"] != second["counts"]


def test_blocks_with_collectives_and_other_ops_are_kept_or_recomputed_whole(
    results: RankResults,
) -> None:
    assert results.of("experts: fsdp")[0]["strategies"] == ["Keep", "Recompute"]


@pytest.mark.parametrize("case", ["sharded outputs", "hooks that shard"])
def test_blocks_that_return_sharded_tensors_are_planned(case: str, results: RankResults) -> None:
    """Also where hooks make them: a block is run alone with what it was given before its hooks."""
    assert_one_plan(results.of(case))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_a_pipeline_are_fitted_apart(schedule: str, results: RankResults) -> None:
    found = results.of(f"pipeline: {schedule}")
    assert [rank["same"] for rank in found] == [True, True]
    assert [rank["plan"]["fits"] for rank in found] == [True, True]
    assert [rank["depth"] for rank in found] == [2, 4]


def test_the_ranks_of_a_stage_are_fitted_together(results: RankResults) -> None:
    """Two stages of two ranks each, which FSDP2 shards a stage over."""
    found = results.of("pipeline: 1f1b, fsdp", 4)
    assert_one_plan(found[:2])
    assert_one_plan(found[2:])
    assert [rank["depth"] for rank in found] == [2, 2, 4, 4]


def test_stages_of_a_pipeline_without_a_group_are_refused(results: RankResults) -> None:
    for rank in results.of("stages together"):
        assert rank["raised"]["type"] == "ValueError"
        assert "give group=" in rank["raised"]["text"]


def test_a_plan_for_a_model_applies_in_every_wrapper_and_back(results: RankResults) -> None:
    for rank in results.of("moved"):
        assert rank["same"]
        assert rank["seen through"]
        assert rank["plans"] == [["Stack", ["blocks.0", "blocks.1"]]] * 3
        assert len(set(rank["kinds"])) == 1


def test_a_wrapper_is_no_block(results: RankResults) -> None:
    for rank in results.of("lone block"):
        assert rank == {"blocks": [["", "Block"]], "same": True}
