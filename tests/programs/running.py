"""Run a program from a fixed seed, and compare what two runs leave behind, bit for bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import rekindle
from tests.programs.backwards import BACKWARDS
from tests.programs.modes import MODES, Mode
from tests.programs.steps import Program
from tests.programs.training import Training


def run(
    program: Program, plain: bool, device: str = "cpu", modes: Mapping[str, Mode] = MODES
) -> dict[str, Any]:
    """Run a program from a fixed seed; what the step leaves behind, by name."""
    t = Training(program, plain, torch.device(device), modes)
    buffers = dict(t.world.named_buffers())
    BACKWARDS[program.backward](t)
    t.note_all(((name, leaf.grad) for name, leaf in t.leaves.items()), "grad of")
    for name, buffer in t.world.named_buffers():
        t.note(f"buffer {name}", buffer)
        t.note(f"buffer {name} is the same tensor", buffer is buffers[name])
    t.note("training", [module.training for module in t.world.modules()])
    t.note("rng state", torch.get_rng_state())
    t.note("generator's state", t.generator.get_state())
    if device != "cpu":
        t.note("device's rng state", torch.cuda.get_rng_state())
    t.note("grad mode", torch.is_grad_enabled())
    t.note("autocast", torch.is_autocast_enabled(device))
    t.note("recomputing", rekindle.is_recomputing())
    return t.found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What is not the same, bit for bit, in two outcomes of `run`."""
    lines = [
        f"{name}:\n  plain   {expected[name]}\n  regions {found[name]}"
        for name in expected
        if name in found and not _identical(expected[name], found[name])
    ]
    if expected.keys() != found.keys():
        lines.append(f"other outcomes: {sorted(expected.keys() ^ found.keys())}")
    return lines


def _identical(a: Any, b: Any) -> bool:
    """Equal in type, shape and every bit; a NaN is a NaN."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.is_floating_point():
        a, b = (torch.where(x.isnan(), torch.nan, x) for x in (a, b))
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))
