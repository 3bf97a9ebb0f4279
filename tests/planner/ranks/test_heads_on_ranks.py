"""Heads by rows in a distributed run: two real processes, one plan."""

import pytest
import torch.distributed as dist

from tests.ranks import RankResults, results_of_worker

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """The results of both ranks."""
    pytest.importorskip("scipy")
    folder = tmp_path_factory.mktemp("heads")
    return results_of_worker("tests.planner.ranks.heads_worker", folder)


each_kind = pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor parallel"])


@each_kind
def test_gradients_are_those_without_the_plan(results: RankResults, kind: str) -> None:
    assert [rank["same"] for rank in results.of(kind)] == [True, True]
    assert [rank["same after remove"] for rank in results.of(kind)] == [True, True]


@each_kind
def test_the_step_fits_on_every_rank(results: RankResults, kind: str) -> None:
    assert [rank["fits"] for rank in results.of(kind)] == [True, True]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_head_goes_by_rows_on_every_rank(results: RankResults, kind: str) -> None:
    assert [rank["heads"] for rank in results.of(kind)] == [[["head", "rows"]]] * 2


def test_a_head_that_is_split_between_ranks_runs_as_it_is(results: RankResults) -> None:
    assert [rank["heads"] for rank in results.of("tensor parallel")] == [[], []]
