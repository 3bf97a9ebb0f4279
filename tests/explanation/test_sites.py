"""Storages are those of the op, module and line that made them, of the kind that they are."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from tests.explanation.models import DIM, TOKENS, WORDS, Doubled, GptBlock, Views, gpt
from tests.toys import Stack

pytestmark = pytest.mark.usefixtures("few_sets")
ROWS = 2 * TOKENS
FLOAT = 4


def line_of(function: object, text: str) -> str:
    """File and line of the one line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    file = inspect.getsourcefile(function)  # type: ignore[arg-type]
    assert file is not None
    return f"{file[file.index('tests') :]}:{first + offset}"


@pytest.fixture(scope="module")
def explained() -> rekindle.Explanation:
    torch.manual_seed(0)
    return rekindle.explain(*gpt(), device="meta", like="cpu")


def test_a_saved_tensor_has_the_line_of_user_code_that_made_it(
    explained: rekindle.Explanation,
) -> None:
    (gelu,) = [each for each in explained.saved if each.op == "gelu"]
    assert gelu.line == line_of(GptBlock.forward, "gelu(")
    assert gelu.source == "hidden = nn.functional.gelu(self.up(self.second(x)))"
    assert gelu.modules == ("blocks.0", "blocks.1", "blocks.2")
    assert gelu.nbytes == 3 * ROWS * 4 * DIM * FLOAT
    assert gelu.needed_by == ("AddmmBackward in blocks.*.down",)


def test_lines_have_the_bytes_of_their_ops(explained: rekindle.Explanation) -> None:
    place = line_of(GptBlock.forward, "gelu(")
    (line,) = [each for each in explained.lines if each.name == place]
    # Of each block: the norm, its mean and deviation, the product of `up`, and the GELU.
    norm = ROWS * (DIM + 2)
    assert line.at_peak == 3 * FLOAT * (norm + 2 * ROWS * 4 * DIM)


def test_logits_are_what_a_log_softmax_reads_and_makes(explained: rekindle.Explanation) -> None:
    (logits,) = [each for each in explained.kinds if each.name == "logits"]
    # The product of the head is the log-softmax's input as it is; at most there are its result,
    # the gradient of that, and the gradient of the logits, when the input is freed.
    assert logits.highest == 3 * ROWS * WORDS * FLOAT


def test_logits_in_half_are_logits_and_so_are_their_casts() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(DIM, WORDS, bias=False)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(x)
            capped = 5 * torch.tanh(logits / 5)
            return nn.functional.cross_entropy(capped.float(), labels)

    model = Half().to(torch.bfloat16)
    x, labels = torch.randn(ROWS, DIM, dtype=torch.bfloat16), torch.randint(WORDS, (ROWS,))
    found = rekindle.explain(model, (x, labels), device="meta", like="cpu")
    by_op = {each.op: each for each in found.saved}
    (logits,) = [each for each in found.kinds if each.name == "logits"]
    (activations,) = [each for each in found.kinds if each.name == "activations"]
    assert by_op["tanh"].nbytes == 2 * ROWS * WORDS
    assert activations.highest == 2 * FLOAT  # the loss, and its number of labels
    assert logits.highest >= ROWS * WORDS * (2 + 2 * FLOAT)


class Outside(nn.Module):
    """Recomputes its blocks by torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(3, DIM)

    def forward(self, x: Tensor) -> Tensor:
        def run(block: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = torch_checkpoint(block, x, use_reentrant=False)
            return out

        out: Tensor = self.stack(x, run=run)
        return out.square().mean()


def test_a_replay_has_the_modules_and_lines_of_its_forward() -> None:
    found = rekindle.explain(Outside(), torch.randn(8, DIM), device="meta", like="cpu")
    replay = found.kind_names.index("replay")
    highest = {each.name: each.highest for each in found.kinds}
    assert highest["replay"] > 0
    assert "gelu in replay" in {each.name for each in found.ops}
    assert {point.module for point in found.timeline if point.phase == "replay"} >= {
        "stack.blocks.0.mlp",
        "stack.blocks.2.mlp",
    }
    held = [each for each in found.modules if each.name == "stack.blocks.2"]
    assert held[0].kinds[replay] == found.modules[0].kinds[replay] > 0


def test_the_backward_of_an_op_is_at_the_line_of_its_forward() -> None:
    model = nn.Sequential(Views())
    found = rekindle.explain(model, torch.randn(8, DIM), loss=lambda out: out.sum())
    backward = [point for point in found.timeline if point.phase == "backward"]
    assert {point.module for point in backward} == {"", "0", "0.linear"}
    assert line_of(Views.forward, "sigmoid()") in {each.name for each in found.lines}


def test_a_function_with_a_backward_in_python_is_named() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Doubled.apply(self.linear(x))  # type: ignore[no-untyped-call]
            return out

    model = nn.Sequential(Layer(), Layer())
    found = rekindle.explain(model, torch.randn(8, DIM), loss=lambda out: out.sum())
    (doubled,) = [each for each in found.saved if each.op == "mul"]
    assert doubled.line == line_of(Doubled.forward, "x * 2")
    assert doubled.modules == ("0", "1")
    assert "DoubledBackward in *" in doubled.needed_by
