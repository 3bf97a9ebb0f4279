"""Compares a step of regions on a GPU with the plain step."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rekindle
from tests.toys import assert_same_step

Run = Callable[..., Any]


def plain(function: Run, *args: Any) -> Any:
    return function(*args)


def assert_same_with(program: Callable[[Run], Any], leaves: list[Tensor], **options: Any) -> None:
    """The same step, plain and checkpointed, and the same CUDA random state after it."""
    states: list[Tensor] = []

    def run(region: Run) -> Callable[[], Any]:
        return lambda: program(region)

    def backward(loss: Tensor) -> None:
        loss.backward()
        states.append(torch.cuda.get_rng_state())

    options = {"backward": backward, **options}
    assert_same_step(run(plain), run(rekindle.checkpoint), leaves, **options)
    if states:
        assert torch.equal(*states), "the step left another CUDA random state"


def assert_runs_alone(program: str) -> None:
    """A program in a process of its own, where nothing has been used before."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
