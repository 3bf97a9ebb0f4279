"""Field notes 16, 17, 18, 27 and 31 in real processes: DDP, FSDP2, tensor and pipeline parallel."""

import re
from itertools import product

import pytest
import torch
import torch.distributed as dist

import rekindle
from tests.distributed.parallel_cases import CASES, Case
from tests.distributed.parallel_model import DEPTH, GATHERS, Outcome, counted
from tests.distributed.parallel_worker import WORLDS
from tests.ranks import ROOT, RankResults, results_of_worker
from tests.toys import same_bits

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch with gloo"
)


class Results:
    """The outcomes of every rank, by case and way."""

    def __init__(self, results: RankResults) -> None:
        self._results = results

    def of(self, case: Case, way: str) -> list[Outcome]:
        """The outcomes of all ranks, if none failed."""
        return [Outcome(**found) for found in self._results.of((case.name, way), case.world)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases of both worlds, in one go."""
    folder = tmp_path_factory.mktemp("distributed")
    return Results(results_of_worker("tests.distributed.parallel_worker", folder, WORLDS))


def named(part: str) -> list[Case]:
    found = [case for case in CASES if part in case.name]
    assert found, part
    return found


def each(cases: list[Case], *ways: str) -> pytest.MarkDecorator:
    """A test for every case and way, or for these ways alone."""
    pairs = [(case, way) for case in cases for way in case.ways if not ways or way in ways]
    ids = [f"{case}-{way}" for case, way in pairs]
    return pytest.mark.parametrize(("case", "way"), pairs, ids=ids)


every_spread = pytest.mark.parametrize("case", [case for case in CASES if case.alike], ids=str)


@each(CASES)
def test_gradients_are_those_of_the_same_run_without_rekindle(
    case: Case, way: str, results: Results
) -> None:
    """On every rank, at every step, bit for bit."""
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        assert len(plain.grads) == len(ours.grads) > 1
        for a, b in zip(plain.grads, ours.grads, strict=True):
            assert a.keys() == b.keys()
            assert any(grad is not None and grad.any() for grad in a.values())
            assert [name for name in a if not same_bits(a[name], b[name])] == []


@every_spread
def test_ranks_run_the_same_collectives_in_the_same_order(case: Case, results: Results) -> None:
    for way, group in product(case.ways, case.alike):
        outcomes = results.of(case, way)
        first, *others = (outcomes[rank].collectives for rank in group)
        assert first
        assert all(other == first for other in others), way


IN_REPLAY = re.compile("^replay")


@every_spread
def test_forward_and_backward_run_the_collectives_that_they_ran_before(
    case: Case, results: Results
) -> None:
    """A replay adds its own between them, and takes none away."""
    for way in case.ways:
        for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
            left = iter(ours.collectives)
            missing = [line for line in plain.collectives if not any(_same(line, x) for x in left)]
            assert missing == [], way


def _same(line: str, other: str) -> bool:
    """The same collective, whether FSDP gathers before a replay or in it."""
    return line == IN_REPLAY.sub("backward", other)


@each([case for case in CASES if not case.name.startswith("pp")], "checkpoint", "recompute")
def test_every_region_is_replayed_once(case: Case, way: str, results: Results) -> None:
    for outcome in results.of(case, way):
        assert outcome.forwards > 0
        assert outcome.replays == outcome.forwards


@each(CASES, "spill")
def test_activations_are_spilled(case: Case, way: str, results: Results) -> None:
    """Or the gradients would show nothing."""
    assert all(outcome.spilled > 0 for outcome in results.of(case, way))


@each(named("fsdp: unit"))
def test_fsdp_gathers_as_often_as_without_rekindle(case: Case, way: str, results: Results) -> None:
    """Field note 18."""
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        assert sum(counted(ours.collectives, *GATHERS)) == sum(counted(plain.collectives, *GATHERS))


@each(named("reshard False"))
def test_fsdp_gathers_nothing_again_where_parameters_stay(
    case: Case, way: str, results: Results
) -> None:
    for outcome in results.of(case, way):
        assert counted(outcome.collectives, "_allgather_base_")[1:] == (0, 0)


@each([case for case in named("fsdp: unit layer") if "one region" not in case.name])
def test_a_layer_that_is_unit_and_region_is_gathered_alone(
    case: Case, way: str, results: Results
) -> None:
    """No more parameters are there at a time than without rekindle."""
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        assert ours.gathered == plain.gathered


@pytest.mark.parametrize("way", ["checkpoint", "recompute"])
def test_a_region_of_several_units_has_all_of_them_gathered_at_a_time(
    way: str, results: Results
) -> None:
    """FSDP keeps in backward what a replay gathered; docs/distributed.md says how to avoid it."""
    (case,) = named("fsdp: unit layer, reshard True, one region")
    (plain, *_), (ours, *_) = results.of(case, "plain"), results.of(case, way)
    assert (plain.gathered, ours.gathered) == (744, 1344)


ROWS = [
    ("a layer", "a layer", "fsdp: unit layer, reshard {}"),
    ("attention, MLP", "a layer", "fsdp: unit part, reshard {}"),
    ("the model", "a layer", "fsdp: unit root, reshard {}"),
    ("a layer", "the model", "fsdp: unit layer, reshard {}, one region"),
]


def table(results: Results) -> str:
    """The counts of docs/distributed.md."""
    heads = ["unit", "region", "reshard", "plain", "`checkpoint`", "`apply`", "policy"]
    heads += ["plain, at a time", "replayed, at a time", "policy, at a time"]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for unit, region, name in ROWS:
        for reshard in (True, False):
            case = next(case for case in CASES if case.name == name.format(reshard))
            ways = ("plain", "checkpoint", "recompute", "policy")
            plain, checkpoint, applied, policy = (results.of(case, way)[0] for way in ways)
            assert checkpoint.gathered == applied.gathered
            cells = [unit, region, f"`{reshard}`"]
            for outcome in (plain, checkpoint, applied, policy):
                forward, replay, backward = counted(outcome.collectives, "_allgather_base_")
                cells.append(f"{forward} + {backward + replay}")
            cells += [f"{o.gathered:,}" for o in (plain, checkpoint, policy)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_counts_of_the_guide_are_those_of_these_runs(results: Results) -> None:
    expected = table(results)
    assert expected in (ROOT / "docs" / "distributed.md").read_text(), expected


@each(named("tp: applied") + named("tp: 4 ranks") + named("ddp+tp"), "checkpoint", "recompute")
def test_a_layer_that_is_split_replays_one_of_its_two_sums(
    case: Case, way: str, results: Results
) -> None:
    """Nothing needs what comes after the last matmul: the replay stops there."""
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        assert counted(plain.collectives, "all_reduce")[:2] == (2 * DEPTH, 0)
        assert counted(ours.collectives, "all_reduce")[:2] == (2 * DEPTH, DEPTH)


@each(named("tp: applied") + named("tp: 4 ranks") + named("ddp+tp"), "policy")
def test_a_policy_that_says_nothing_of_collectives_sums_once_more_for_every_layer(
    case: Case, way: str, results: Results
) -> None:
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        assert counted(ours.collectives, "all_reduce") == (2 * DEPTH, 0, 5 * DEPTH)
        assert counted(plain.collectives, "all_reduce") == (2 * DEPTH, 0, 4 * DEPTH)


@each(named("tp:"), "policy and collectives")
def test_a_policy_that_keeps_collectives_runs_none_again(
    case: Case, way: str, results: Results
) -> None:
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        assert ours.collectives == plain.collectives


@each(named("tp: sequence"), "policy")
def test_a_policy_holds_what_was_gathered_along_the_sequence(
    case: Case, way: str, results: Results
) -> None:
    """DTensor gathers inside an `autograd.Function` of its own: the result is held as it is."""
    for plain, ours in zip(results.of(case, "plain"), results.of(case, way), strict=True):
        before, now = (sum(counted(got.collectives, *GATHERS)) for got in (plain, ours))
        assert now == before


@each(named("bubble, groups"))
def test_input_and_weight_gradients_of_a_pipeline_share_one_replay_in_an_exec_group(
    case: Case, way: str, results: Results
) -> None:
    """Field note 27."""
    for outcome in results.of(case, way):
        assert outcome.forwards > 0
        assert outcome.replays == outcome.forwards


@each(named("pp: zero bubble, no groups"), "recompute")
def test_without_an_exec_group_a_region_is_replayed_for_every_group_of_weights(
    case: Case, way: str, results: Results
) -> None:
    """Once for its input, and then for each of the 8 sets of weights that torch goes through; the
    first stage has no gradient of its input, and so one backward."""
    first, last = results.of(case, way)
    assert (first.forwards, first.replays) == (16, 8 + 8 * 9)
    assert (last.forwards, last.replays) == (16, 16 * 9)


@each(named("pp: 1F1B"), "checkpoint", "recompute", "policy")
def test_a_pipeline_with_whole_backwards_replays_every_region_once(
    case: Case, way: str, results: Results
) -> None:
    for outcome in results.of(case, way):
        assert outcome.replays == outcome.forwards > 0


def test_a_parameter_that_was_sharded_again_is_named_where_a_policy_needs_it() -> None:
    """A region over several units: nothing gathers a unit's parameters for the region's replay."""
    weight = torch.nn.Parameter(torch.rand(8))
    x = torch.randn(8, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        scaled = x.sin() * weight
        return (scaled.sin() * scaled).sum()

    out = rekindle.checkpoint(region, x, context_fn=rekindle.policies.keep_matmuls)
    weight.untyped_storage().resize_(0)  # what FSDP2 does
    with pytest.raises(rekindle.CheckpointError, match="sharded again"):
        torch.autograd.grad(out, x)
