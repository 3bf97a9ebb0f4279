"""Modules that may be heads, and heads that run by rows: the same bits, whatever is around them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import rekindle
from rekindle.modules.forward import forward_of
from rekindle.modules.heads import heads_of, saved_by_rows
from rekindle.planner.instruments.memory_meter import metered
from rekindle.strategy import Rows
from tests.language_models import (
    LOGITS,
    WIDTH,
    WORDS,
    LanguageModel,
    gradients_of,
    next_word,
    same,
    some_words,
)
from tests.toys import Block

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def test_heads_are_outside_the_blocks_and_widen() -> None:
    """An embedding may be one by that; it is none in a step, because its input is no state."""
    assert list(heads_of(LanguageModel(), BLOCKS)) == ["embedding", "head"]
    assert heads_of(LanguageModel(), [""]) == {}
    assert heads_of(LanguageModel(), []) == {}


def test_a_block_that_has_a_path_outside_the_blocks_is_no_head() -> None:
    block = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))
    assert heads_of(nn.Sequential(block, block), ["0"]) == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_and_scripted_modules_are_no_heads() -> None:
    model = LanguageModel()
    model.head.compile(backend="eager")
    assert list(heads_of(model, BLOCKS)) == ["embedding"]
    model.head = torch.jit.trace(nn.Linear(WIDTH, WORDS), torch.randn(2, WIDTH))
    assert list(heads_of(model, BLOCKS)) == ["embedding"]


def assert_same_by_rows(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Tensor] | None = None,
    path: str = "head",
    saves: bool = True,
) -> None:
    """Compare a step with and without a head by rows, and after `remove`."""
    plain = gradients_of(model, *args, loss=loss)
    rekindle.apply(model, {path: "rows"})
    assert same(gradients_of(model, *args, loss=loss), plain)
    assert bool(saved_by_rows(model.get_submodule(path))) is saves
    rekindle.remove(model)
    assert forward_of(model.get_submodule(path)) is None
    assert same(gradients_of(model, *args, loss=loss), plain)


def ignoring(logits: Tensor, words: Tensor) -> Tensor:
    labels = words.masked_fill(words % 3 == 0, -100).flatten()
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100)


def viewed(logits: Tensor, words: Tensor) -> Tensor:
    """The loss of views alone, as of float32 logits that are not shifted."""
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), words.view(-1))


def smoothed(logits: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), words.flatten(), label_smoothing=0.1)


def capped_with_z_loss(logits: Tensor, words: Tensor) -> Tensor:
    capped = 30 * torch.tanh(logits.float() / 30)
    z_loss = capped.logsumexp(-1).square().mean()
    return functional.cross_entropy(capped.flatten(0, 1), words.flatten()) + 1e-3 * z_loss


def log_probs(logits: Tensor, words: Tensor) -> Tensor:
    """The loss of reinforcement learning: the log-probability of each chosen word."""
    found = torch.log_softmax(logits.float() / 0.7, -1).gather(-1, words.unsqueeze(-1))
    return -(found.squeeze(-1) * torch.linspace(-1, 1, found.numel()).view(words.shape)).mean()


@pytest.mark.parametrize(
    "loss", [next_word, ignoring, viewed, smoothed, capped_with_z_loss, log_probs]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_with_every_loss_and_dtype(loss: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_same_by_rows(LanguageModel(loss=loss).to(dtype), some_words())


@pytest.mark.parametrize("shape", [(1, 33), (3, 17), (2, 1)])
def test_gradients_are_the_same_with_every_shape(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = LanguageModel(loss=ignoring, words=1031)
    assert_same_by_rows(model, some_words(*shape, words=1031))


def test_a_head_tied_to_the_embedding_gets_the_gradients_of_both() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    model.head.weight = model.embedding.weight
    assert_same_by_rows(model, some_words())


def test_the_gradient_of_a_view_is_written_over_the_logits() -> None:
    """Autograd holds the tensor that it is a view of, which nobody else reads."""
    torch.manual_seed(0)
    model, words = LanguageModel(loss=viewed), some_words()
    rekindle.apply(model, {"head": "rows"})
    with metered(torch.device("cpu"), [*model.parameters(), words]) as meter:
        model(words).backward()
        assert meter.peak() < 1.6 * LOGITS


class LoraHead(nn.Module):
    """A frozen head with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WORDS, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.base(hidden) + self.b(self.a(hidden)) * 2
        return out


def test_a_head_with_an_adapter_goes_by_rows_as_one_module() -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    model.head = LoraHead()
    assert "head" in heads_of(model, BLOCKS)
    assert_same_by_rows(model, some_words())


class UnderAutocast(LanguageModel):
    """A model that runs under autocast."""

    def forward(self, words: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(words)


def test_gradients_are_the_same_under_autocast() -> None:
    torch.manual_seed(0)
    assert_same_by_rows(UnderAutocast(), some_words())


def test_logits_that_are_used_twice_have_the_gradients_of_both_uses() -> None:
    torch.manual_seed(0)

    def twice(logits: Tensor, words: Tensor) -> Tensor:
        return next_word(logits, words) + 1e-3 * logits.float().pow(2).mean()

    assert_same_by_rows(LanguageModel(loss=twice), some_words())


def test_logits_that_a_metric_reads_have_their_values() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    def with_accuracy(logits: Tensor, words: Tensor) -> Tensor:
        seen.append((logits.argmax(-1) == words).float().mean().detach())
        return next_word(logits, words)

    assert_same_by_rows(LanguageModel(loss=with_accuracy), some_words())
    assert len(set(map(float, seen))) == 1


def test_generation_is_untouched() -> None:
    model = LanguageModel(loss=None).eval()
    words = some_words()
    with torch.no_grad():
        plain = model(words)
        rekindle.apply(model, {"head": "rows"})
        found = model(words)
    assert type(found) is Tensor
    assert torch.equal(found, plain)


def test_a_head_without_logits_is_as_close_to_the_truth_as_the_plain_one() -> None:
    """The error against the same step in float64 is no larger, but for a tenth."""
    torch.manual_seed(0)
    model, words = LanguageModel(), some_words()
    plain = gradients_of(model, words)
    rekindle.apply(model, {"head": Rows(exact=False)})
    tiled = gradients_of(model, words)
    assert saved_by_rows(model.head)
    rekindle.remove(model)
    truth = gradients_of(model.double(), words)

    def error(found: Any) -> float:
        pairs = zip(found[1], truth[1], strict=True)
        return max(float((one - true).norm() / true.norm()) for one, true in pairs)

    model.float()
    assert error(tiled) <= 1.1 * error(plain)


def test_a_module_that_is_given_no_state_runs_as_it_is() -> None:
    model = LanguageModel()
    assert_same_by_rows(model, some_words(), path="embedding", saves=False)
    assert isinstance(model.blocks[0], Block)
