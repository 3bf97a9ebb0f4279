"""What the tests of `patch_torch` share."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed._composable import checkpoint_activation
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrappers
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

from rekindle.compat import checkpoint as compat
from tests.toys import leaf

torch_module = torch.utils.checkpoint
torchs_checkpoint = torch_module.checkpoint
torchs_generator = torch_module._checkpoint_without_reentrant_generator
REPLACED = sorted(
    name
    for name in torch_module.__all__
    if getattr(torch_module, name) is not getattr(compat, name)
)
PATCHED = (torch_module, torch_wrappers, checkpoint_activation, fsdp)

Make = Callable[[str], ModuleType]
TOOK_IT = """
    from torch.utils.checkpoint import checkpoint, checkpoint as ckpt, CheckpointError
    from torch.utils.checkpoint import set_checkpoint_early_stop

    def run(function, *args, **options):
        return ckpt(function, *args, use_reentrant=False, **options)
"""


def attributes() -> dict[tuple[str, str], Any]:
    """Every attribute of the modules that are patched."""
    return {
        (module.__name__, name): value for module in PATCHED for name, value in vars(module).items()
    }


def differing(before: dict[Any, Any]) -> list[Any]:
    after = attributes()
    assert before.keys() == after.keys()
    return [key for key in before if before[key] is not after[key]]


def ends(calls: list[str], x: Tensor) -> Tensor:
    """A region that notes its end: a replay that stops early does not come to it."""
    y = x.sin().exp()
    z = y.cos() + 1
    calls.append("end")
    return z


def count_ends(run: Callable[..., Any], **options: Any) -> int:
    calls: list[str] = []
    run(functools.partial(ends, calls), leaf(3), use_reentrant=False, **options).sum().backward()
    return len(calls)
