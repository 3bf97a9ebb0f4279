"""A budget in a distributed run: two real processes, one plan."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rekindle.budget.verifying import BIT_FOR_BIT

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    pytest.importorskip("scipy")
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.budget_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port), str(folder)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.wait(timeout=120)
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


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
