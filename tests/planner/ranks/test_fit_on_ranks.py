"""A budget in a distributed run: two real processes, one plan."""

import pytest
import torch.distributed as dist

from rekindle.planner.verify import BIT_FOR_BIT
from tests.ranks import RankResults, results_of_worker

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """The results of both ranks."""
    pytest.importorskip("scipy")
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_worker("tests.planner.ranks.fit_worker", folder)


each_kind = pytest.mark.parametrize("kind", ["ddp", "fsdp"])
each_kind_and_compiled = pytest.mark.parametrize("kind", ["ddp", "fsdp", "compiled"])


@each_kind_and_compiled
def test_gradients_are_those_without_the_plan(results: RankResults, kind: str) -> None:
    assert [rank["same"] for rank in results.of(kind)] == [True, True]


@each_kind_and_compiled
def test_the_step_fits_on_every_rank(results: RankResults, kind: str) -> None:
    assert [rank["fits"] for rank in results.of(kind)] == [True, True]


@each_kind_and_compiled
def test_all_ranks_have_the_plan_of_the_first(results: RankResults, kind: str) -> None:
    first, second = results.of(kind)
    assert first["options"] == second["options"]


@each_kind_and_compiled
def test_gradients_are_verified_on_every_rank(results: RankResults, kind: str) -> None:
    assert all(rank["verified"].startswith(BIT_FOR_BIT) for rank in results.of(kind))


@each_kind
def test_gradients_that_are_wrong_on_one_rank_are_refused_on_all(
    results: RankResults, kind: str
) -> None:
    assert [rank["refused"] for rank in results.of(kind)] == [True, True]


@each_kind
def test_a_larger_batch_on_one_rank_leaves_the_plan(results: RankResults, kind: str) -> None:
    """And is waited for by nobody."""
    assert [rank["larger"] for rank in results.of(kind)] == [True, True]


def test_sharded_layers_that_are_compiled_are_planned_as_compiled_code(
    results: RankResults,
) -> None:
    for rank in results.of("compiled"):
        assert rank["compiled"] == ("blocks.0", "blocks.1", "blocks.2")
        assert rank["compiled_later"] == 0
