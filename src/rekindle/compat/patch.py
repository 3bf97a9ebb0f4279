"""`patch_torch`: code that calls torch's checkpoint or its wrappers runs on rekindle, unedited.

Names are replaced where they are bound: in torch's modules, and in every loaded one that imported
one of them. What was replaced is put back on leaving; a module that was imported meanwhile and took
ours for torch's is given torch's.
"""

import inspect
import sys
import threading
from types import ModuleType
from typing import Any, Self

import torch.utils.checkpoint as torch_checkpoints

from rekindle.compat import checkpoint as our_checkpoints
from rekindle.compat import checkpoint_wrapper as our_wrappers
from rekindle.compile.hand_over import dynamo_swaps
from rekindle.torch_private.torch_wrappers import torch_wrappers

_PAIRS: tuple[tuple[ModuleType, ModuleType, tuple[str, ...]], ...] = (
    (
        torch_checkpoints,
        our_checkpoints,
        ("_checkpoint_without_reentrant_generator", "_infer_device_type"),
    ),
    (torch_wrappers, our_wrappers, ()),
)
"""Torch's modules, ours for them, and the private names that are replaced beside the public."""

_swaps: list[tuple[Any, Any]] = [
    (getattr(torchs, name), getattr(ours, name))
    for torchs, ours, private in _PAIRS
    for name in (*ours.__all__, *private)
    if hasattr(torchs, name)  # another version of torch may have other names
    and getattr(torchs, name) is not getattr(ours, name)
]
"""Torch's objects, and ours for them."""

_lock = threading.Lock()
_active: list["Patch"] = []


class Patch:
    """A patch that is in place until it is undone: by leaving it as a context, or by `undo()`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []
        self._loaded: set[str] = set()
        self._swaps: list[tuple[Any, Any]] = []

    def _apply(self) -> None:
        self._swaps = [*_swaps, *dynamo_swaps()]
        instead = {id(original): ours for original, ours in self._swaps}
        self._loaded = set(sys.modules)
        for module in _foreign_modules(self._loaded):
            for attribute, value in list(vars(module).items()):
                if id(value) in instead:
                    setattr(module, attribute, instead[id(value)])
                    self._replaced.append((module, attribute, value))

    def undo(self) -> None:
        """Put everything back; once."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
        for module, attribute, original in self._replaced:
            setattr(module, attribute, original)
        back = {id(ours): original for original, ours in self._swaps}
        for module in _foreign_modules(set(sys.modules) - self._loaded):
            if not _speaks_of_rekindle(module):
                for attribute, value in list(vars(module).items()):
                    if id(value) in back:
                        setattr(module, attribute, back[id(value)])
        self._replaced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _foreign_modules(names: set[str]) -> list[ModuleType]:
    loaded = [(name, sys.modules.get(name)) for name in names]
    return [
        module
        for name, module in loaded
        if isinstance(module, ModuleType) and name.partition(".")[0] != "rekindle"
    ]


def _speaks_of_rekindle(module: ModuleType) -> bool:
    """True if a module may have got our objects from us rather than in torch's place."""
    try:
        return "rekindle" in inspect.getsource(module)
    except (OSError, TypeError):
        return "rekindle" in vars(module)


def patch_torch() -> Patch:
    """Put rekindle in torch's place: for good, or for a `with` block.

    That is in the place of `torch.utils.checkpoint`, and of the wrappers in
    `torch.distributed.algorithms._checkpoint.checkpoint_wrapper`.

    Patching twice is one patch: the inner one changes nothing, and undoes nothing.

    >>> import torch.utils.checkpoint, rekindle
    >>> x = torch.ones(2, requires_grad=True)
    >>> with rekindle.patch_torch(), rekindle.observe() as seen:
    ...     y = torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False)
    >>> seen.total.forwards
    1
    """
    patch = Patch()
    with _lock:
        if not _active:
            _active.append(patch)
            patch._apply()
    return patch
