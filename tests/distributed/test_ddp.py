"""Field note 17: `DistributedDataParallel` around regions is the same run as without them."""

import pytest
import torch.distributed as dist

from tests.distributed.ddp_worker import CASES, REGIONS, STEPS, WORLD, Case
from tests.ranks import RankResults, results_of_worker
from tests.toys import same_bits

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo"
)
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_rank = pytest.mark.parametrize("rank", range(WORLD))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """The results of two real processes, all cases in one go."""
    return results_of_worker("tests.distributed.ddp_worker", tmp_path_factory.mktemp("ddp"))


@every_rank
@every_case
def test_gradients_under_ddp_are_those_without_regions(
    case: Case, rank: int, results: RankResults
) -> None:
    """Field note 17, at every step."""
    plain, ours = (results.of((str(case), checkpointed))[rank] for checkpointed in (False, True))
    assert len(plain["grads"]) == len(ours["grads"]) == STEPS
    for a, b in zip(plain["grads"], ours["grads"], strict=True):
        assert a.keys() == b.keys()
        assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_rank
@every_case
def test_weights_and_buffers_under_ddp_are_those_without_regions(
    case: Case, rank: int, results: RankResults
) -> None:
    a, b = (results.of((str(case), regions))[rank]["state"] for regions in (False, True))
    assert a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_case
def test_both_ranks_have_the_same_gradients(case: Case, results: RankResults) -> None:
    """They saw other data, so that the gradients were summed shows."""
    first, second = (rank["grads"] for rank in results.of((str(case), True)))
    for a, b in zip(first, second, strict=True):
        assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_rank
@every_case
def test_every_region_under_ddp_is_replayed_once(
    case: Case, rank: int, results: RankResults
) -> None:
    backwards = sum(case.micro_batches(step) for step in range(STEPS))
    assert results.of((str(case), True))[rank]["counts"] == (REGIONS * backwards,) * 2


@every_case
def test_the_run_without_regions_has_none(case: Case, results: RankResults) -> None:
    assert results.of((str(case), False))[0]["counts"] == (0, 0)
