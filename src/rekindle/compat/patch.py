"""`patch_torch`: code that calls `torch.utils.checkpoint` runs on rekindle, and nobody edits it.

Names are replaced where they are bound: in torch's module, and in every loaded module that imported
one of them. What was replaced is put back on leaving; a module that was imported meanwhile and took
ours for torch's is given torch's.
"""

import inspect
import sys
import threading
from types import ModuleType
from typing import Any, Self

import torch.utils.checkpoint as torch_module

from rekindle.compat import checkpoint as ours

_PRIVATE = ("_checkpoint_without_reentrant_generator", "_infer_device_type")
_originals = {
    name: getattr(torch_module, name)
    for name in (*torch_module.__all__, *_PRIVATE)
    if hasattr(torch_module, name)  # another version of torch may have other names
    and hasattr(ours, name)
    and getattr(torch_module, name) is not getattr(ours, name)
}
_lock = threading.Lock()
_active: list["Patch"] = []


class Patch:
    """A patch that is in place until it is undone: by leaving it as a context, or by `undo()`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []
        self._loaded: set[str] = set()

    def _apply(self) -> None:
        by_id = {id(original): name for name, original in _originals.items()}
        self._loaded = set(sys.modules)
        for module in _foreign_modules(self._loaded):
            for attribute, value in list(vars(module).items()):
                name = by_id.get(id(value))
                if name is not None:
                    setattr(module, attribute, getattr(ours, name))
                    self._replaced.append((module, attribute, value))

    def undo(self) -> None:
        """Put everything back; once."""
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
        for module, attribute, original in self._replaced:
            setattr(module, attribute, original)
        back = {id(getattr(ours, name)): original for name, original in _originals.items()}
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
    """Whether a module may have got our objects from us rather than in torch's place."""
    try:
        return "rekindle" in inspect.getsource(module)
    except (OSError, TypeError):
        return "rekindle" in vars(module)


def patch_torch() -> Patch:
    """Put rekindle in the place of `torch.utils.checkpoint`: for good, or for a `with` block.

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
