"""Models that run torch's checkpoint themselves: a plan says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import rekindle
from tests.toys import Stack

pytest.importorskip("scipy")


class Own(nn.Module):
    """Blocks that run their inner part by torch's checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = Stack(2, 16)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def run(block: nn.Module, x: Tensor) -> Tensor:
            checkpoint = torch.utils.checkpoint.checkpoint
            return checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

        out: Tensor = self.blocks(x, run)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_by_itself_is_told_where(
    reentrant: bool, log_lines: Callable[[], list[str]]
) -> None:
    x = torch.randn(64, 16, requires_grad=True)
    rekindle.profile(Own(reentrant), x, loss=torch.sum, device="meta", like="H100")
    [line] = log_lines()
    assert "Own runs torch's checkpoint itself, at " in line
    lines = Path(__file__).read_text().splitlines()
    number = next(i for i, text in enumerate(lines, 1) if "return checkpoint(" in text)
    assert f"{Path(__file__).name}:{number}: what that recomputes" in line


def test_nothing_is_said_of_a_model_that_does_not(log_lines: Callable[[], list[str]]) -> None:
    forward = torch.utils.checkpoint.CheckpointFunction.forward
    rekindle.profile(Stack(2, 16), torch.randn(64, 16), loss=torch.sum, device="meta", like="H100")
    assert log_lines() == []
    assert torch.utils.checkpoint.CheckpointFunction.forward is forward
