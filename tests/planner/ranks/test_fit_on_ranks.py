"""A budget in a distributed run: two real processes, one plan."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from rekindle.planner.verify import BIT_FOR_BIT
from tests.planner.ranks.fit_worker import WORLD
from tests.ranks import run_worker

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    pytest.importorskip("scipy")
    folder = tmp_path_factory.mktemp("ranks")
    run_worker("tests.planner.ranks.fit_worker", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


each_kind = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@each_kind
def test_gradients_are_those_without_the_plan(ranks: list[dict[str, Any]], kind: str) -> None:
    assert [rank[kind]["same"] for rank in ranks] == [True, True]


@each_kind
def test_the_step_fits_on_every_rank(ranks: list[dict[str, Any]], kind: str) -> None:
    assert [rank[kind]["fits"] for rank in ranks] == [True, True]


@each_kind
def test_all_ranks_have_the_plan_of_the_first(ranks: list[dict[str, Any]], kind: str) -> None:
    assert ranks[0][kind]["options"] == ranks[1][kind]["options"]


@each_kind
def test_gradients_are_verified_on_every_rank(ranks: list[dict[str, Any]], kind: str) -> None:
    assert all(rank[kind]["verified"].startswith(BIT_FOR_BIT) for rank in ranks)


@each_kind
def test_gradients_that_are_wrong_on_one_rank_are_refused_on_all(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    assert [rank[kind]["refused"] for rank in ranks] == [True, True]


@each_kind
def test_a_larger_batch_on_one_rank_leaves_the_plan(ranks: list[dict[str, Any]], kind: str) -> None:
    """And is waited for by nobody."""
    assert [rank[kind]["larger"] for rank in ranks] == [True, True]
