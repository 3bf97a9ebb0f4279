"""Logits by rows on a GPU: the bits of whole logits, also where rows have odd lengths."""

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.rows.by_rows import by_rows
from rekindle.strategy import Rows
from tests.language_models import LanguageModel, gradients_of, same, some_words
from tests.rows.losses import EVERY, Loss

pytestmark = pytest.mark.gpu

SAMPLES, LENGTH, WIDTH = 4, 300, 64


def step(loss: Loss, classes: int, dtype: torch.dtype, goes_by_rows: bool) -> list[Tensor]:
    """The loss of a head, and the gradients of its input and its weight."""
    torch.manual_seed(1)
    hidden = torch.randn(SAMPLES, LENGTH, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(0, classes, (SAMPLES, LENGTH), device="cuda")
    logits = torch.nn.functional.linear(hidden, weight)
    out = loss(by_rows(logits) if goes_by_rows else logits, labels)
    return [out.detach(), *torch.autograd.grad(out, (hidden, weight))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [1000, 4096, 50257])
@pytest.mark.parametrize("loss", EVERY, ids=lambda loss: loss.__name__)
def test_losses_and_gradients_are_those_of_whole_logits(
    loss: Loss, classes: int, dtype: torch.dtype
) -> None:
    plain, rows = (step(loss, classes, dtype, goes_by_rows) for goes_by_rows in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, rows, strict=True))


@pytest.mark.parametrize("words", [20_000, 20_001])
def test_a_plan_with_the_head_by_rows_fits_and_has_the_plain_gradients(words: int) -> None:
    pytest.importorskip("scipy")
    model, batch = LanguageModel(words=words).cuda(), some_words(16, 512, words).cuda()
    plain = gradients_of(model, batch)
    model.zero_grad()
    plan = rekindle.fit(model, batch, budget="50%")
    assert [strategy for *_, strategy in plan.heads] == [Rows()]
    assert plan.measured_peak is not None
    assert plan.measured_peak <= plan.budget
    assert same(gradients_of(model, batch), plain)
    rekindle.remove(model)
