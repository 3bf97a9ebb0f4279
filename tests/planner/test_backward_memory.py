"""Memory in the backward of blocks that they do not hold; outputs that nobody uses."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.planner.instruments.timing import DeviceClock
from rekindle.planner.measure.measure_step import measure_step
from rekindle.planner.plan_for_budget import plan_by
from rekindle.planner.timeline import simulate
from rekindle.planner.trace.block_outputs import OutputUse
from rekindle.planner.trace.head_ways import trace_steps
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Profile
from rekindle.strategy import Keep, Recompute
from tests.toys import Block, Mlp

WIDTH, TOKENS, WORDS = 16, 64, 400


class TiedWeights(nn.Module):
    """An embedding whose weights are the head's: its gradient waits from the head to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.words(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), words)


class Biased(nn.Module):
    """Blocks that all read one bias, whose gradient waits for the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(TOKENS, 1))
        self.blocks = nn.ModuleList(Shifted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.expand(TOKENS, WIDTH).contiguous()
        for block in self.blocks:
            x = block(x, bias)
        return x.square().mean()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x + bias)
        return out


class Twice(nn.Module):
    """One block that runs twice: the gradients of its weights wait for its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.square().mean()


class Scored(nn.Module):
    """Returns what only it needs beside its result, as attention returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.up(x).softmax(-1)
        return x + self.down(scores), scores


class DropsScores(nn.Module):
    """A step that uses the first part of each block's output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scored() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x)
            x = out[0]
        return x.square().mean()


class SumsScores(DropsScores):
    """A step that trains the other part, too, by an op that saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in self.blocks:
            x, scores = block(x)
            total = total + scores.sum()
        return x.square().mean() + total


def words() -> Tensor:
    return torch.randint(WORDS, (TOKENS,))


def numbers() -> Tensor:
    return torch.randn(TOKENS, WIDTH)


def recomputing_peaks(model: nn.Module, batch: Tensor) -> tuple[Profile, int, int]:
    """The profile, and the predicted and the measured peak of a step that recomputes all blocks."""
    profile = rekindle.profile(model, batch)
    menus = [profile.candidates(i) for i in range(len(profile.order))]
    chosen = [next(each for each in menu if each.strategy == Recompute()) for menu in menus]
    found = simulate(profile, chosen)
    plan = plan_by(profile, 2**30, chosen, found, 0.0)
    return profile, found.peak, measure_step(TrainingStep(model, batch), plan, profile).peak


@pytest.mark.parametrize(
    ("kind", "batch"),
    [(TiedWeights, words), (Biased, numbers), (Twice, numbers), (DropsScores, numbers)],
)
def test_the_peak_of_recomputing_is_predicted_to_the_byte(
    kind: Callable[[], nn.Module], batch: Callable[[], Tensor]
) -> None:
    _, predicted, measured = recomputing_peaks(kind(), batch())
    assert predicted == measured


def test_the_gradient_of_tied_weights_waits_in_each_backward() -> None:
    profile, _, _ = recomputing_peaks(TiedWeights(), words())
    assert profile.waiting == (4 * WORDS * WIDTH,) * 3


def test_the_gradient_of_a_shared_bias_waits_until_the_first_block() -> None:
    profile, _, _ = recomputing_peaks(Biased(), numbers())
    assert profile.waiting == (4 * TOKENS * WIDTH,) * 2 + (0,)


def test_nothing_waits_in_a_chain_of_blocks() -> None:
    model = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
    profile = rekindle.profile(model, lambda: model(numbers()).square().mean())
    assert profile.waiting == ()


def test_what_nobody_uses_of_an_output_is_not_held() -> None:
    profile, _, _ = recomputing_peaks(DropsScores(), numbers())
    (recomputing,) = [c for c in profile.candidates(0) if c.strategy == Recompute()]
    assert recomputing.bytes_held == 4 * TOKENS * WIDTH  # the result, without eight times that
    (keeping,) = [c for c in profile.candidates(0) if c.strategy == Keep()]
    assert keeping.bytes_held == (1 + 8) * 4 * TOKENS * WIDTH  # the block itself needs its scores


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        (DropsScores, OutputUse(lives=False, has_gradient=False)),
        (SumsScores, OutputUse(lives=False, has_gradient=True)),
    ],
)
def test_the_trace_tells_what_a_step_uses_of_outputs(
    kind: type[DropsScores], second: OutputUse
) -> None:
    model, batch = kind(), numbers()
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    device = torch.device("cpu")
    step = TrainingStep(model, batch)
    calls = trace_steps(step, dict(blocks), device, DeviceClock(device)).calls
    assert {call.output_uses for call in calls.values()} == {(OutputUse(True, True), second)}
