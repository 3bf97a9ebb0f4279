"""Candidates that recompute modules inside a block: bytes, bits, and what is left behind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.modules.forward import forward_of
from rekindle.planner.candidates import candidates, offloading
from rekindle.planner.devices import device_named
from rekindle.planner.trace.block_trace import record
from rekindle.planner.types import BlockTrace, Candidate
from rekindle.strategy import SavedIndices
from tests.toys import same_bits


class WrittenOut(nn.Module):
    """GELU by its formula, in several ops, with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x + 0.044715 * x.pow(3)
        return nn.functional.dropout(0.5 * x * (1.0 + (0.8 * inner).tanh()), 0.1, self.training)


class Block(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.act, self.down = nn.Linear(dim, 64), WrittenOut(), nn.Linear(64, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class CheckpointsItself(Block):
    """A block with a region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + rekindle.checkpoint(super().forward, x)


ROWS = 32
HIDDEN = ROWS * 64 * 4
"""Bytes of one result in the middle."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def trace_of(block: nn.Module) -> BlockTrace:
    x = torch.randn(ROWS, 16, requires_grad=True)
    return record(lambda: block(x), device_named("cpu"), block)


def recomputing_act(block: nn.Module) -> Candidate:
    found = [c for c in candidates(trace_of(block)) if _modules(c) == ("act",)]
    assert found, "the activation function is worth its replay"
    return found[0]


def _modules(candidate: Candidate) -> tuple[str, ...]:
    return getattr(candidate.strategy, "modules", ())


def step(block: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(1)
    block.zero_grad()
    x = torch.linspace(-2, 2, ROWS * 16).view(ROWS, 16).requires_grad_()
    block(x).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


def test_gradients_are_those_of_the_plain_step() -> None:
    block = Block()
    plain = step(block)
    rekindle.apply(block, {"": recomputing_act(block).strategy})
    assert all(map(same_bits, step(block), plain))


def test_the_module_is_a_region_and_nothing_else_is() -> None:
    block = Block()
    rekindle.apply(block, {"": recomputing_act(block).strategy})
    with rekindle.observe() as seen:
        step(block)
    assert (seen.total.forwards, seen.total.replays, seen.total.bytes_held) == (1, 1, HIDDEN)


def test_as_many_tensors_are_saved_around_it_as_the_plan_says() -> None:
    """A warning, which is an error here, would say that the plan no longer matches."""
    block = Block()
    strategy = recomputing_act(block).strategy
    assert isinstance(strategy, SavedIndices)
    rekindle.apply(block, {"": SavedIndices((0,), count=strategy.count, modules=("act",))})
    step(block)


def test_remove_leaves_the_block_and_the_module_as_they_were() -> None:
    block = Block()
    rekindle.apply(block, {"": recomputing_act(block).strategy})
    assert forward_of(block.act) is not None
    rekindle.remove(block)
    assert all(forward_of(module) is None for module in block.modules())


@pytest.mark.parametrize("tier", ["disk"])
def test_what_is_saved_around_it_can_be_moved(tier: str) -> None:
    """The indices of what is moved leave out what is saved in the module."""
    block = Block()
    plain = step(block)
    trace, candidate = trace_of(block), recomputing_act(block)
    moving = offloading(candidate, trace, tier="disk")[-1]
    assert isinstance(moving.strategy, SavedIndices)
    assert moving.strategy.offloaded
    assert max(moving.strategy.offloaded) < moving.strategy.count
    rekindle.apply(block, {"": moving.strategy})
    with rekindle.observe() as seen:
        found = step(block)
    assert all(map(same_bits, found, plain))
    assert seen.spill.bytes_out <= moving.bytes_moved


def test_what_the_region_holds_is_not_moved() -> None:
    """The input of the activation function is held by its region, whoever else saved it."""
    block = Block()
    trace = trace_of(block)
    moving = offloading(recomputing_act(block), trace, tier="disk")[-1]
    assert moving.bytes_moved < trace.saved_bytes - 4 * HIDDEN


def test_a_block_with_regions_of_its_own_has_no_such_candidates() -> None:
    assert trace_of(CheckpointsItself()).called == ()


def test_a_path_that_the_block_does_not_have_is_refused() -> None:
    strategy = SavedIndices(modules=("gone",))
    with pytest.raises(ValueError, match="has no module 'gone', which its strategy names"):
        rekindle.apply(nn.Sequential(Block()), {"0": strategy})


def test_a_plan_with_such_candidates_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    model = nn.Sequential(*[Block() for _ in range(6)])
    x = torch.randn(256, 16)
    profile = rekindle.profile(model, x, loss=lambda out: out.square().mean())
    plan = next(
        plan
        for plan in (rekindle.solve(profile, f"{share}%") for share in range(95, 30, -5))
        if any(_modules(candidate) for _, _, candidate in plan.blocks)
    )
    plan.save(tmp_path / "plan.json")
    assert rekindle.Plan.load(tmp_path / "plan.json") == plan


def test_a_fitted_model_may_recompute_modules_in_its_blocks() -> None:
    model = nn.Sequential(*[Block() for _ in range(6)])
    x = torch.randn(256, 16)
    loss = lambda out: out.square().mean()  # noqa: E731
    profile = rekindle.profile(model, x, loss=loss)
    by_modules = profile_with_modules_alone(profile)
    plan = rekindle.fit(model, x, "75%", loss=loss, profile=by_modules)
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert any(_modules(candidate) for _, _, candidate in plan.blocks)
    assert plan.verified is not None
    assert plan.verified.startswith("gradients bit for bit")


def profile_with_modules_alone(profile: rekindle.Profile) -> rekindle.Profile:
    """A profile whose blocks are kept, recomputed, or have the activation function recomputed."""
    return replace(
        profile,
        blocks=tuple(
            replace(
                block,
                candidates=tuple(
                    c
                    for c in block.candidates
                    if c.describe() in ("keep", "recompute") or _modules(c)
                ),
            )
            for block in profile.blocks
        ),
    )
