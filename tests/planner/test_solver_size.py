"""Planning a model of many layers: what is measured and solved does not grow with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.solve import milp as program
from rekindle.planner.trace.block_calls import BlockCall
from rekindle.planner.trace.block_trace import trace_block
from tests.planner.random_profiles import layers
from tests.toys import Stack

pytest.importorskip("scipy")


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The rows and variables of what HiGHS is given."""
    found: list[tuple[int, int]] = []
    milp = program.milp

    def counted(cost: Any, *, constraints: Any, **options: Any) -> Any:
        found.append(constraints.A.shape)
        assert constraints.A.shape[1] == len(cost)
        return milp(cost, constraints=constraints, **options)

    monkeypatch.setattr(program, "milp", counted)
    return found


@pytest.mark.parametrize(("counts", "programs"), [((8, 32), 1), ((96, 256), 2)])
def test_what_is_solved_is_as_large_for_any_number_of_layers(
    counts: tuple[int, int], programs: int, problems: list[tuple[int, int]]
) -> None:
    """Deep models solve one program more, as their annealing has few tries; it grows no more."""
    found = []
    for count in counts:
        problems.clear()
        plan = rekindle.solve(layers(count), "50%")
        assert len(plan.blocks) == count
        found.append(list(problems))
    assert len(found[0]) == programs
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [2, 16])
def test_layers_that_are_alike_are_measured_once(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []

    def counted(call: BlockCall, *args: Any) -> Any:
        traced.append(call.block)
        return trace_block(call, *args)

    monkeypatch.setattr("rekindle.planner.profile_model.trace_block", counted)
    model, x = Stack(count, 16), torch.randn(8, 16, requires_grad=True)
    profile = rekindle.profile(model, x)
    assert traced == [model.blocks[0]]
    assert len(profile.order) == count


class Densely(nn.Module):
    """A block that takes sparse input too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.to_dense() if x.is_sparse else x).relu()
        return out


def test_a_sparse_input_has_no_storage_and_is_profiled_all_the_same() -> None:
    model = nn.Sequential(Densely(), Densely(), Densely())
    x = torch.randn(4, 8)
    profile = rekindle.profile(model, x.to_sparse())
    assert [path for path, _ in profile.order] == ["0", "1", "2"]
    assert profile.static_bytes == rekindle.profile(model, x).static_bytes - x.nbytes
