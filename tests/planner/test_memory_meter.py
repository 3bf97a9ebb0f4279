"""Bytes that budgets count on a CPU, and those that docs/budget.md says they do not."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rrelu

import rekindle
from rekindle.planner.instruments.memory_meter import LiveBytes, metered, metered_as_a_whole
from rekindle.planner.training_step import describe_tree
from rekindle.regions.recompute import rng_state as random_state

CPU = torch.device("cpu")
SIZE = 4 * 64 * 4
"""Bytes of one activation."""
DOCS = Path(__file__).parents[2] / "docs" / "budget.md"


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the random states that are taken."""
    taken: list[int] = []
    take = random_state._cpu_state

    def noted() -> Tensor:
        state = take()
        taken.append(state.nbytes)
        return state

    monkeypatch.setattr(random_state, "_cpu_state", noted)
    return taken


def test_a_random_state_is_as_large_as_the_docs_say() -> None:
    assert torch.get_rng_state().nbytes == 5056
    assert "5,056 bytes each" in DOCS.read_text()


@pytest.mark.parametrize("count", [1, 3])
def test_a_region_holds_one_random_state_that_the_meter_does_not_count(
    count: int, states: list[int]
) -> None:
    with metered(CPU) as meter:
        x = torch.ones(4, 64, requires_grad=True)
        for _ in range(count):
            x = rekindle.checkpoint(lambda x: x.sin().exp(), x)
        assert meter.now() == (count + 1) * SIZE
        assert states == [5056] * count
        x.sum().backward()
        assert states == [5056] * 2 * count  # one more while each is replayed
        del x


def test_under_a_policy_each_random_op_that_is_made_again_holds_a_state(states: list[int]) -> None:
    def region(x: Any) -> Any:
        return torch.bernoulli(torch.rand_like(x)) * x.exp()

    x = torch.ones(4, 64, requires_grad=True)
    run = functools.partial(
        rekindle.checkpoint, region, x, context_fn=rekindle.policies.recompute()
    )
    run()  # the first call of a function is prepared for compiled code, and that holds a state
    states.clear()
    run()
    assert states == [5056] * 2  # of `rand_like`, and of `bernoulli`


def test_a_region_that_does_not_preserve_the_random_state_holds_none(states: list[int]) -> None:
    x = torch.ones(4, 64, requires_grad=True)
    rekindle.checkpoint(rrelu, x, preserve_rng_state=False).sum().backward()
    assert states == []


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Objects go when nothing holds them, and cycles stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_part_does_not_miss_what_was_there_before_it() -> None:
    with metered_as_a_whole(CPU) as whole:
        before = [torch.ones(4, 64)]
        with metered(CPU) as part:
            x = torch.ones(4, 64)
            assert (part.now(), whole.now()) == (SIZE, 2 * SIZE)
            before.clear()
            assert (part.now(), whole.now()) == (SIZE, SIZE)
            del x
        assert (part.peak(), whole.peak()) == (SIZE, 2 * SIZE)


def test_a_part_does_not_count_what_was_there_before_it_when_an_op_returns_it() -> None:
    with metered_as_a_whole(CPU) as whole:
        before = torch.ones(4, 64)
        with metered(CPU) as part:
            before.view(-1).add_(1)
            assert (part.peak(), whole.peak()) == (0, SIZE)


def test_what_is_made_at_the_address_of_what_was_known_counts() -> None:
    known = torch.ones(4, 64)
    with LiveBytes([known]) as live:
        del known
        made = [torch.ones(4, 64) for _ in range(100)]
        assert live.now() == len(made) * SIZE


@pytest.mark.usefixtures("no_collector")
def test_a_meter_that_is_over_is_held_by_nothing_that_it_has_seen() -> None:
    known = torch.ones(4, 64)
    with LiveBytes([known]) as live:
        seen = torch.ones(4, 64)
    gone = ref(live), ref(known.untyped_storage())
    del live, known
    assert [each() for each in gone] == [None, None]
    del seen


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("wraps", [None, list, nn.utils.rnn.PackedSequence])
def test_a_batch_in_words_holds_none_of_its_tensors(wraps: Any) -> None:
    x = torch.ones(4)
    batch = x if wraps is None else wraps((x,)) if wraps is list else wraps(x, torch.ones(4).long())
    assert "float32[4]" in str(describe_tree(batch))
    gone = ref(x)
    del x, batch
    assert gone() is None
