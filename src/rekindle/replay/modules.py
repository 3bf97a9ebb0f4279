"""The modules a region runs: buffers end a step as without a replay, modes are as in forward.

Note [Buffers are replayed from what they were]. A module that changes a buffer (BatchNorm's running
statistics, a power iteration, an expert-load counter) would change it a second time in replay, and
would replay from the changed value. So a replay runs on stand-ins: for each module that changed a
buffer in forward, copies of its buffers as they were before, swapped in for the replay and thrown
away after. Which modules change theirs is learnt: a module that was never seen before is copied in
its first forward; after that only if it did change something. Kernels of the batch-norm family
write running statistics without telling the version counter, so those modules always count as
changing while they train. Buffers above `_LARGE` bytes (masks, rotary tables) are copied only once
they have been seen to change.
"""

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_LARGE = 1 << 20
_CLOSURE_DEPTH = 3
_LONG = 256  # a longer list in a closure is data, not layers
_MANY = 10_000

_changes: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Modules with buffers that ran in a region before: did they ever change one?"""


class ModuleState:
    """Modes and buffers of the modules under a region, as its forward found them."""

    __slots__ = ("_before", "_modules", "_training", "_watched")

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._training = [module.training for module in modules]
        self._before: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._watched = [_Watched(module) for module in modules if module._buffers]
        for watched in self._watched:
            if watched.known is not False:
                self._before[watched.module] = watched.copies()

    def close(self) -> None:
        """The forward has ended: keep copies where a module changed a buffer, drop the rest."""
        for watched in self._watched:
            module = watched.module
            if watched.changed():
                _changes[module] = True
                self._before.setdefault(module, watched.buffers)
            else:
                if watched.known is None:
                    _changes[module] = False
                self._before.pop(module, None)
        self._watched.clear()

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Modes and changed buffers as the forward found them; after, as they are now."""
        modes = [module.training for module in self._modules]
        buffers = [(module, dict(module._buffers)) for module in self._before]
        try:
            if modes != self._training:
                _set_modes(self._modules, self._training)
            for module, before in self._before.items():
                for name, buffer in before.items():
                    module._buffers[name] = None if buffer is None else buffer.detach().clone()
            yield
        finally:
            if modes != self._training:
                _set_modes(self._modules, modes)
            for module, now in buffers:
                module._buffers.update(now)

    def is_as_before(self) -> bool:
        """Whether a replay finds everything as the forward did."""
        return not self._before and self._training == [m.training for m in self._modules]


def _set_modes(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, training in zip(modules, modes, strict=True):
        module.training = training


class _Watched:
    """The buffers of one module before a forward, and whether the forward changed them."""

    __slots__ = ("_versions", "buffers", "known", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.known = _changes.get(module)
        self.buffers = dict(module._buffers)
        self._versions = [b if b is None else b._version for b in self.buffers.values()]

    def copies(self) -> dict[str, Tensor | None]:
        limit = float("inf") if self.known else _LARGE
        return {
            name: b if b is None or b.nbytes > limit else b.detach().clone()
            for name, b in self.buffers.items()
        }

    def changed(self) -> bool:
        module, now = self.module, self.module._buffers
        if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
            return True
        return (
            len(now) != len(self.buffers)
            or any(now.get(name) is not buffer for name, buffer in self.buffers.items())
            or self._versions != [b if b is None else b._version for b in self.buffers.values()]
        )


def reached_from(function: Callable[..., Any], args: tuple[Any, ...]) -> list[nn.Module]:
    """Every module that a call of `function` can be seen to reach.

    Seen are: the function if it is a module, the object of a bound method, what a partial or a
    closure carries, and modules among the arguments; and all modules below them.
    """
    roots: list[nn.Module] = []
    if isinstance(function, nn.Module):
        roots.append(function)
    else:
        _collect(function, roots, _CLOSURE_DEPTH)
    roots += [arg for arg in args if isinstance(arg, nn.Module)]
    if not roots:
        return roots
    for module in roots:  # grows while it is walked
        children = module._modules
        if children:
            roots.extend([child for child in children.values() if child is not None])
            if len(roots) > _MANY:  # also what a module that holds itself comes to
                return list({child: None for root in roots for child in root.modules()})
    return roots


def _collect(value: Any, roots: list[nn.Module], depth: int) -> None:
    if isinstance(value, nn.Module):
        roots.append(value)
    elif depth == 0:
        return
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _collect(part, roots, depth - 1)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                _collect(cell.cell_contents, roots, depth - 1)
            except ValueError:  # a variable that is not assigned yet
                continue
    elif isinstance(value, list | tuple) and len(value) <= _LONG:
        for part in value:
            _collect(part, roots, depth - 1)
    elif (owner := getattr(value, "__self__", None)) is not None:
        _collect(owner, roots, depth - 1)
