"""Plans that offload: the menu's options, and on a GPU whether a step goes as the plan says."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import rekindle
from benchmarks.decoder import Decoder, Shape
from rekindle.planner.candidates import offloading, recomputing_saved, with_names
from rekindle.planner.types import BlockTrace, Candidate, TracedOp, TracedValue
from rekindle.regions.selective.decisions import Decision
from rekindle.regions.selective.planned_ops import NumberedOpsPolicy, policy_of
from rekindle.strategy import NumberedOps, SavedIndices, Selective

pytest.importorskip("scipy")


def parts(option: Candidate) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a candidate keeps (or makes again, of saved tensors), and what it moves, by number."""
    match option.strategy:
        case SavedIndices(recomputed=one, offloaded=other):
            return one, other
        case Selective(policy=NumberedOps(kept=one, offloaded=other)):
            return one, other
    raise TypeError(option.strategy)


GRAPH = BlockTrace(
    ops=tuple(
        TracedOp(number, f"op {number}", 0.0, (), (i,)) for i, number in enumerate((2, 5, 7, 9))
    ),
    values=(
        TracedValue(10, 0),
        TracedValue(40, 1),
        TracedValue(20, 2),
        TracedValue(80, 3, changes=True),
    ),
    saved=frozenset({0, 1, 2, 3}),
)
KEPT = Candidate(Selective(NumberedOps((2, 5, 7, 9))), 200, 0, 1.0, 2.0, 300, 50)


def test_the_largest_results_are_sent_away_first() -> None:
    one, two, three = offloading(KEPT, GRAPH)
    assert (*parts(one), one.bytes_moved) == ((2, 7, 9), (5,), 40)
    assert (*parts(two), two.bytes_moved) == ((2, 9), (5, 7), 60)
    assert (*parts(three), three.bytes_moved) == ((9,), (2, 5, 7), 70)


def test_what_is_moved_is_not_held_and_comes_on_top_in_backward() -> None:
    for option in offloading(KEPT, GRAPH):
        assert option.bytes_held == KEPT.bytes_held - option.bytes_moved
        assert option.backward_peak == KEPT.backward_peak + option.bytes_moved
        assert (option.seconds, option.forward_peak) == (KEPT.seconds, KEPT.forward_peak)


def test_what_backward_does_not_need_is_not_moved() -> None:
    graph = replace(GRAPH, saved=frozenset({0}))
    (only,) = offloading(KEPT, graph)
    assert parts(only)[1] == (2,)


def test_of_many_results_the_largest_are_tried_one_by_one_and_then_all() -> None:
    ops = tuple(TracedOp(i, "", 0.0, (), (i,)) for i in range(20))
    graph = BlockTrace(ops, tuple(TracedValue(100 - i, i) for i in range(20)), frozenset(range(20)))
    found = offloading(replace(KEPT, strategy=Selective(NumberedOps(tuple(range(20))))), graph)
    assert [len(parts(option)[1]) for option in found] == [1, 2, 3, 4, 5, 6, 20]


SAVES = replace(GRAPH, saved_tensors=(1, None, 0, 1, 2, 3))
"""The second value is saved twice, and something from outside."""


def test_by_what_is_saved_a_result_goes_wherever_it_is_saved() -> None:
    one, two, three = offloading(Candidate(SavedIndices(), bytes_held=200), SAVES)
    assert (parts(one)[1], one.bytes_moved, one.largest_moved) == ((0, 3), 40, 40)
    assert (parts(two)[1], two.bytes_moved, two.largest_moved) == ((0, 3, 4), 60, 40)
    assert (parts(three)[1], three.bytes_moved) == ((0, 2, 3, 4), 70)


def test_what_is_derived_is_not_moved() -> None:
    found = offloading(Candidate(SavedIndices((2, 4))), SAVES)
    assert [parts(option)[1] for option in found] == [(0, 3)]
    assert parts(found[0])[0] == (2, 4)


def test_each_result_that_moves_takes_the_host_its_time() -> None:
    whole = Candidate(SavedIndices(), forward_host_seconds=1.0, backward_host_seconds=2.0)
    found = offloading(whole, SAVES, (0.25, 0.5))
    assert [(o.forward_host_seconds, o.backward_host_seconds) for o in found] == [
        (1.25, 2.5),
        (1.5, 3.0),
        (1.75, 3.5),
    ]


def test_all_that_one_op_recomputes_is_a_candidate_and_the_large_ones_alone() -> None:
    large, whole = recomputing_saved((0, 2, 3, 4), SAVES)
    assert parts(large) == ((0, 3, 4), ())  # 40 and 20, not 10
    assert parts(whole)[0] == (0, 2, 3, 4)
    assert [parts(option)[0] for option in recomputing_saved((0, 3), SAVES)] == [(0, 3)]
    assert recomputing_saved((), SAVES) == []


def test_names_are_those_of_the_ops_that_made_what_is_saved() -> None:
    option = with_names(Candidate(SavedIndices((2, 4), (0, 3))), SAVES)
    assert (option.recomputed_names, option.offloaded_names) == (("op 7", "op 2"), ("op 5",))
    assert option.describe() == (
        "recompute 2 results (op 7, op 2), offload 1 result (op 5), keep the rest"
    )
    assert Candidate(SavedIndices()).describe() == "keep"


def test_a_strategy_is_run_by_the_numbers_of_its_ops() -> None:
    policy = policy_of(NumberedOps((2,), (5,)))
    assert isinstance(policy, NumberedOpsPolicy)
    assert policy.by_number == {2: Decision.KEEP, 5: Decision.OFFLOAD_AS_PLANNED}


@pytest.fixture
def decoder(deterministic: None) -> Decoder:
    shape = Shape("gpu", dim=1024, ffn=4096, heads=8, kv_heads=4, layers=6, batch=2, tokens=2048)
    return Decoder(shape, device="cuda", dtype=torch.bfloat16)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_on_a_gpu_what_is_derived_from_what_is_away_is_the_same(decoder: Decoder) -> None:
    x = decoder.shape.hidden_states(device="cuda").requires_grad_()

    def step() -> list[torch.Tensor]:
        decoder.zero_grad()
        decoder(x).sum().backward()
        return [p.grad.clone() for p in decoder.parameters() if p.grad is not None]

    expected = step()
    profile = rekindle.profile(decoder, lambda: decoder(x).sum())
    both = [
        o
        for o in profile.blocks[0].candidates
        if isinstance(o.strategy, SavedIndices) and all(parts(o))
    ]
    option = max(both, key=lambda o: o.bytes_moved)
    rekindle.apply(decoder, option.strategy)
    for _ in range(4):
        with rekindle.observe() as seen:
            assert all(map(torch.equal, step(), expected))
    assert seen.offload.bytes_out > 0
    assert seen.total.ops_replayed == 6 * len(option.recomputed_names)
    rekindle.remove(decoder)


@pytest.mark.gpu
@pytest.mark.parametrize("share", ["70%", "50%", "35%", "30%"])
def test_on_a_gpu_a_step_goes_as_planned(share: str, decoder: Decoder) -> None:
    x = decoder.shape.hidden_states(device="cuda").requires_grad_()

    def step() -> list[torch.Tensor]:
        decoder.zero_grad(set_to_none=False)
        decoder(x).sum().backward()
        return [p.grad.clone() for p in decoder.parameters() if p.grad is not None]

    step()
    expected = step()
    profile = rekindle.profile(decoder, lambda: decoder(x).sum())
    plan = rekindle.solve(profile, share)
    rekindle.apply(decoder, plan)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with rekindle.observe() as seen:
        decoder(x).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    predicted = plan.predicted_peak - profile.static_bytes
    assert peak <= 1.05 * predicted
    moved = sum(option.bytes_moved for _, _, option in plan.blocks)
    largest = max(option.largest_moved for _, _, option in plan.blocks)
    assert moved - 3 * largest <= seen.offload.bytes_out <= moved  # what backward begins with stays
    assert all(map(torch.equal, step(), expected))
