"""Field note 17: `DistributedDataParallel` around regions is the same run as without them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ddp_worker import CASES, REGIONS, STEPS, WORLD, Case
from tests.ranks import run_worker
from tests.toys import same_bits

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo"
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_rank = pytest.mark.parametrize("rank", range(WORLD))

Results = list[dict[tuple[str, bool], Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two real processes got, all cases in one go."""
    folder = tmp_path_factory.mktemp("ddp")
    run_worker("tests.distributed.ddp_worker", folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@every_rank
@every_case
def test_gradients_under_ddp_are_those_without_regions(
    case: Case, rank: int, results: Results
) -> None:
    """Field note 17, at every step."""
    plain, ours = (results[rank][str(case), checkpointed] for checkpointed in (False, True))
    assert len(plain["grads"]) == len(ours["grads"]) == STEPS
    for a, b in zip(plain["grads"], ours["grads"], strict=True):
        assert a.keys() == b.keys()
        assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_rank
@every_case
def test_weights_and_buffers_under_ddp_are_those_without_regions(
    case: Case, rank: int, results: Results
) -> None:
    a, b = (results[rank][str(case), checkpointed]["state"] for checkpointed in (False, True))
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_case
def test_both_ranks_have_the_same_gradients(case: Case, results: Results) -> None:
    """They saw other data, so that the gradients were summed shows."""
    first, second = (result[str(case), True]["grads"] for result in results)
    for a, b in zip(first, second, strict=True):
        assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_rank
@every_case
def test_every_region_under_ddp_is_replayed_once(case: Case, rank: int, results: Results) -> None:
    backwards = sum(case.micro_batches(step) for step in range(STEPS))
    assert results[rank][str(case), True]["counts"] == (REGIONS * backwards,) * 2


@every_case
def test_the_run_without_regions_has_none(case: Case, results: Results) -> None:
    assert results[0][str(case), False]["counts"] == (0, 0)
