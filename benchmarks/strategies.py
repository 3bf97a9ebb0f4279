"""The ways to run a block that benchmarks compare, each one function of the block and its input.

All of them recompute the whole block in backward; they differ in whose engine does it and what it
is asked to preserve. They serve the benchmark of a whole decoder and the host cost of one region.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import rekindle
from benchmarks.decoder import RunBlock

Function = Callable[[Tensor], Tensor]


def torch_full(block: Function, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False)
    return out


def torch_no_rng(block: Function, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    return out


def torch_reentrant(block: Function, x: Tensor) -> Tensor:
    out: Tensor = torch_checkpoint(block, x, use_reentrant=True)
    return out


def rekindle_full(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x)
    return out


def rekindle_no_rng(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, preserve_rng_state=False)
    return out


def rekindle_no_check(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, determinism_check="none")
    return out


def rekindle_reentrant(block: Function, x: Tensor) -> Tensor:
    out: Tensor = rekindle.checkpoint(block, x, use_reentrant=True)
    return out


def installed_peers() -> dict[str, RunBlock]:
    """torch_remat, where it is installed: preserves no random state, checks no determinism."""
    if find_spec("torch_remat") is None:
        return {}
    checkpoint = import_module("torch_remat").checkpoint
    return {"torch_remat": lambda block, x: checkpoint()(block)(x)}


TORCH: dict[str, RunBlock] = {
    "torch": torch_full,
    "torch, no RNG": torch_no_rng,
    "torch reentrant": torch_reentrant,
}
REKINDLE: dict[str, RunBlock] = {
    "rekindle": rekindle_full,
    "rekindle, no RNG": rekindle_no_rng,
    "rekindle, no check": rekindle_no_check,
    "rekindle reentrant": rekindle_reentrant,
}
