"""Which modules inside a block to recompute: sets from graphs written by hand."""

import pytest

from rekindle.planner import module_sets as module
from rekindle.planner.candidates import candidates, recomputing_modules
from rekindle.planner.module_sets import given_to, module_sets
from rekindle.planner.types import BlockTrace, TracedOp, TracedValue
from rekindle.strategy import OpAddress, SavedIndices

MIB = 2**20


@pytest.fixture(autouse=True)
def _free_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of sets are those of their ops alone."""
    monkeypatch.setattr(module, "_REGION_SECONDS", 0.0)


def chain(*ops: tuple[str, int, float], called: tuple[str, ...] = ()) -> BlockTrace:
    """Ops in a row, each by module, MiB and seconds; autograd saves what each is given."""
    traced, values = [], []
    for i, (path, mib, seconds) in enumerate(ops):
        inputs = (i - 1,) if i else ()
        address = OpAddress(path, "aten::op", i, len(ops))
        traced.append(TracedOp(i, "aten::op", seconds, inputs, (i,), address))
        values.append(TracedValue(mib * MIB, i, module=path))
    saved = tuple(range(len(ops) - 1))
    return BlockTrace(
        tuple(traced),
        tuple(values),
        frozenset(saved),
        (None, *saved),
        saved_in=tuple(path for path, _, _ in ops),
        called=called or tuple(dict.fromkeys(path for path, _, _ in ops if path)),
    )


ACT = chain(
    ("up", 4, 10.0),
    ("act", 4, 1.0),
    ("act", 4, 1.0),
    ("act", 4, 1.0),
    ("down", 1, 10.0),
    ("", 1, 1),
)
"""An activation function of three ops between two products."""


def test_the_module_that_frees_most_for_its_time_is_recomputed() -> None:
    """Held are the input of `act`, its output, which `down` saves, and that of `down`."""
    (found,) = module_sets(ACT)
    assert found.modules == ("act",)
    assert (found.held, found.replay) == (9 * MIB, 3.0)


def test_what_a_module_is_given_is_held() -> None:
    assert given_to(ACT, ("act",)) == {0}
    assert given_to(ACT, ("act", "down")) == {0, 3}


def test_a_module_takes_the_place_of_those_inside_it() -> None:
    trace = chain(
        ("", 1, 50.0),
        *(("mlp.act", 8, 1.0),) * 3,
        *(("mlp.gate", 2, 0.5),) * 3,
        ("", 1, 50.0),
        called=("mlp.act", "mlp.gate", "mlp"),
    )
    assert [found.modules for found in module_sets(trace)] == [("mlp.act",), ("mlp",)]


def test_experts_are_recomputed_together() -> None:
    trace = chain(
        ("", 1, 50.0), *((f"experts.{i}.act", 4, 1.0) for i in (0, 0, 1, 1)), ("", 1, 50.0)
    )
    assert module_sets(trace)[-1].modules == ("experts.0.act", "experts.1.act")


def test_a_module_that_is_most_of_the_block_is_left_to_whole_blocks() -> None:
    assert module_sets(chain(("", 1, 1.0), *(("mlp", 4, 10.0),) * 3, ("", 1, 1.0))) == []


def test_a_module_that_frees_next_to_nothing_is_not_recomputed() -> None:
    assert (
        module_sets(chain(("", 200, 9.0), ("norm", 1, 0.1), ("norm", 1, 0.1), ("", 1, 1.0))) == []
    )


def test_saved_tensors_are_counted_without_those_saved_in_recomputed_modules() -> None:
    assert ACT.saved_outside(("act",)) == (0, 4, 5)
    assert ACT.saved_outside(()) == (0, 1, 2, 3, 4, 5)
    (found,) = module_sets(ACT)
    assert recomputing_modules(found, ACT).strategy == SavedIndices(count=3, modules=("act",))


def test_sets_of_modules_are_candidates() -> None:
    described = [candidate.describe() for candidate in candidates(ACT)]
    assert "recompute act, keep the rest" in described
