"""Changes that an explanation offers: what they are predicted to save, and which come first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.explanation.types import Change
from rekindle.planner.plan_for_budget import plain_prediction
from rekindle.planner.timeline import simulate
from rekindle.strategy import Recompute
from tests.explanation.models import DIM, gpt
from tests.toys import Block, Stack

pytest.importorskip("scipy")
pytestmark = pytest.mark.usefixtures("few_sets")


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def explained(model: nn.Module, batch: Any, **options: Any) -> rekindle.Explanation:
    return rekindle.explain(model, batch, device="meta", **{"like": "H100", **options})


def change(found: rekindle.Explanation, name: str) -> Change:
    every = (*found.changes, *found.others, *found.unhelpful)
    (named,) = [each for each in every if each.name.startswith(name)]
    return named


def test_recomputing_every_block_is_as_the_timeline_predicts() -> None:
    torch.manual_seed(0)
    model, batch = gpt()
    profile = rekindle.profile(model, batch, device="meta", like="H100")
    found = explained(model, batch)
    candidates = [
        next(each for each in profile.candidates(i) if each.strategy == Recompute())
        for i in range(len(profile.order))
    ]
    predicted = simulate(profile, candidates)
    recompute = change(found, "recompute every block")
    assert (recompute.peak, recompute.seconds) == (predicted.peak, predicted.seconds)
    assert recompute.saved == plain_prediction(profile).peak - predicted.peak
    assert found.seconds == plain_prediction(profile).seconds
    assert recompute.how == 'rekindle.apply(model, {"blocks.*": "recompute"})'


def test_the_code_of_a_change_makes_it() -> None:
    model, x = Stack(4, DIM), torch.randn(256, DIM)
    found = explained(model, x, loss=square)
    some = change(found, "recompute 2 of 4 blocks")
    eval(some.how, {"rekindle": rekindle, "model": model})
    assert [rekindle.is_recomputing(), *_recomputed(model)] == [False, True, True, False, False]
    rekindle.remove(model)


def _recomputed(model: Stack) -> list[bool]:
    """Return which blocks are recomputed: those whose inner results no forward leaves."""
    calls: list[int] = []
    for i, block in enumerate(model.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    model(torch.randn(2, DIM)).sum().backward()
    return [calls.count(i) == 2 for i in range(len(model.blocks))]


def test_half_the_samples_is_what_half_the_batch_takes() -> None:
    model, x = Stack(3, DIM), torch.randn(256, DIM)
    half = explained(model, x[:128].clone(), loss=square)
    predicted = change(explained(model, x, loss=square), "half the samples")
    scalars = 4 * 2  # the loss and its gradient have a number each, which is not halved
    assert abs(predicted.peak - half.peak) <= scalars
    assert not predicted.same_step


def test_a_batch_of_one_sample_is_cut_into_shorter_sequences() -> None:
    found = explained(Stack(3, DIM), torch.randn(1, 256, DIM), loss=square)
    assert change(found, "sequences of half the length").saved > 0


WORDS = 1 << 14


class Headed(nn.Module):
    """Small blocks, and logits that are larger than all they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(DIM) for _ in range(2)))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(x)), labels)


def headed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Headed(), (torch.randn(64, DIM), torch.randint(WORDS, (64,)))


def test_what_the_peak_is_not_made_of_does_not_help_and_the_reason_is_the_peak() -> None:
    found = explained(*headed())
    for name in ("recompute every block", "offload from every block"):
        useless = change(found, name)
        assert useless in found.unhelpful
        assert useless.note.endswith("the peak is then in the head and the loss")
        assert f"no help: {useless.name}: {useless.note}" in str(found)


def test_a_head_by_rows_saves_what_the_profile_measured() -> None:
    found = explained(*headed())
    (rest,) = found.profile.rests
    rows = change(found, "exact rows for the loss")
    assert rows.saved == found.profile.rest_peak - rest.rest_peak
    assert (rows.peak, rows.note) == (found.peak - rows.saved, "")


class HeadInTheLoss(Headed):
    """A model that multiplies by the weight of its head, so that no module is called."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = nn.functional.linear(self.blocks(x), self.head.weight)
        return nn.functional.cross_entropy(logits, labels)


def test_a_loss_by_rows_leaves_one_tensor_of_logits() -> None:
    """The peak is then where the head's weight and the hidden states get their gradients."""
    found = explained(HeadInTheLoss(), headed()[1])
    rows = change(found, "exact rows for the loss")
    logits, weight, hidden = 64 * WORDS * 4, DIM * WORDS * 4, 64 * DIM * 4
    assert found.changes[0] == rows
    assert rows.saved == 2 * logits - weight - hidden
    assert rows.peak_at.startswith("the backward of HeadInTheLoss: mm")


def test_offload_needs_a_link() -> None:
    found = explained(Stack(3, DIM), torch.randn(256, DIM), loss=square, like="cpu")
    offload = change(found, "offload")
    assert offload in found.unhelpful
    assert "no link" in offload.note


def test_the_state_of_an_optimizer_is_offered_to_leave_or_shrink() -> None:
    model, x = Stack(3, DIM), torch.randn(4, DIM)
    optimizer = torch.optim.AdamW(model.parameters())
    found = explained(model, x, loss=square, optimizer=optimizer)
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert change(found, "8-bit optimizer state").saved == state * 3 // 4
    assert change(found, "optimizer state in host memory").saved == state
    without = explained(model, x, loss=square)
    every = (*without.changes, *without.others, *without.unhelpful)
    assert not any("optimizer" in each.name for each in every)


def small_device(nbytes: int) -> rekindle.Device:
    return rekindle.Device("small", 1e12, 1e12, 1e12, 1e12, link=1e10, memory_bytes=nbytes)


def test_where_the_step_does_not_fit_changes_by_which_it_fits_come_first() -> None:
    model, x = Stack(4, DIM), torch.randn(1024, DIM)
    whole = explained(model, x, loss=square)
    assert whole.fits
    room = whole.peak * 2 // 3
    found = explained(model, x, loss=square, like=small_device(room))
    assert found.device_bytes == room
    assert found.fits is False
    fits = [bool(each.fits) for each in found.changes]
    assert fits[0]
    assert fits == sorted(fits, reverse=True)
    plan = change(found, "a plan for")
    assert plan.peak <= room
    assert plan.fits


def test_a_plan_that_does_not_fit_is_named_with_the_least_that_does() -> None:
    found = explained(Stack(3, DIM), torch.randn(256, DIM), loss=square, like=small_device(1024))
    refused = [each for each in found.unhelpful if each.name == "a plan for 1 KiB"]
    assert [each.note.startswith("No plan fits into 1 KiB") for each in refused] == [True]


def test_a_change_that_another_one_does_in_less_time_is_listed_apart() -> None:
    found = explained(Stack(4, DIM), torch.randn(1024, DIM), loss=square)
    timed = [each for each in found.changes if each.seconds is not None]
    assert len(found.changes) <= 5
    for one in timed:
        for other in timed:
            if other.seconds < one.seconds:  # type: ignore[operator]
                assert other.saved < one.saved
