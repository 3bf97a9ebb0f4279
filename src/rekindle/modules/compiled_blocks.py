"""Compiled models whose blocks are run by strategies: each block is then compiled by itself.

`torch.compile` on a model, on a part of it, or on its blocks one by one is set aside while a plan
for compiled blocks is measured or applied. The blocks are compiled in its place, by the same
options: `CompiledForward` is their forward, and strategies work around it. What is between the
blocks of a model that was compiled as a whole runs as it is written. `close_blocks` undoes it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from rekindle.modules.compiled_forward import CompiledForward
from rekindle.modules.forward import Forward, forward_of
from rekindle.modules.unwrapping import places
from rekindle.torch_private.compiled_functions import (
    CompileOptions,
    compile_options,
    compiled_call,
    original_of,
    set_compiled_call,
)

_NAME = "_rekindle_set_aside"


@dataclass(eq=False)
class _SetAside:
    """The traces of `torch.compile` on a module; a copy or a pickle of the module has none."""

    call: Any = None
    """From `module.compile()`."""
    forward: Any = None
    """From `module.forward = torch.compile(...)`, or of the wrapper that `torch.compile` makes."""
    options: CompileOptions | None = field(default=None)

    def __reduce__(self) -> Any:
        return _SetAside, ()

    def put_back(self, module: nn.Module) -> None:
        """Have the module compiled as it was."""
        if self.call is not None:
            set_compiled_call(module, self.call)
        if self.forward is not None:
            vars(module)["forward"] = self.forward


def compiled_options_of(module: nn.Module) -> CompileOptions | None:
    """The options by which a module is compiled itself, also if that is set aside; else None."""
    aside = vars(module).get(_NAME)
    if aside is not None and aside.options is not None:
        found: CompileOptions = aside.options
        return found
    return compile_options(compiled_call(module)) or compile_options(vars(module).get("forward"))


def compiled_paths(model: nn.Module, paths: Iterable[str]) -> tuple[str, ...]:
    """Of some modules, by their paths without wrappers, those that run compiled."""
    return tuple(options_around(model, paths))


def options_around(model: nn.Module, paths: Iterable[str]) -> dict[str, CompileOptions]:
    """The options of those modules that run compiled, by their paths without wrappers."""
    where = places(model)
    found = {path: _options_at(model, where[path]) for path in paths if path in where}
    return {path: options for path, options in found.items() if options is not None}


def _options_at(model: nn.Module, place: str) -> CompileOptions | None:
    """The options of the innermost compiled module that is, or is around, the one at a place."""
    found = None
    for module in _along(model, place):
        found = compiled_options_of(module) or found
    return found


def _along(model: nn.Module, place: str) -> Iterator[nn.Module]:
    """The modules on the way from a model to one at a place, both included."""
    yield model
    module = model
    for name in place.split(".") if place else ():
        module = module.get_submodule(name)
        yield module


def set_aside_around(model: nn.Module, paths: Iterable[str]) -> None:
    """Have no module run compiled that is, or is around, one of some: paths without wrappers."""
    where = places(model)
    for path in paths:
        for module in _along(model, where[path]):
            _set_aside(module)


def _set_aside(module: nn.Module) -> None:
    options = compiled_options_of(module)
    if options is None or _NAME in vars(module):
        return
    forward = vars(module).get("forward")
    if compile_options(forward) is None:  # such as one that is never to be compiled
        forward = None
    vars(module)[_NAME] = _SetAside(compiled_call(module), forward, options)
    set_compiled_call(module, None)
    if forward is None:
        return
    original = original_of(forward)
    if isinstance(original, MethodType) and original.__func__ is type(module).forward:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = original


def open_blocks(model: nn.Module, paths: Iterable[str]) -> None:
    """Compile some modules of a compiled model one by one: paths without wrappers.

    Modules that nothing is compiled around stay as they are.
    """
    where = places(model)
    chosen = options_around(model, paths)
    set_aside_around(model, chosen)
    for path, options in chosen.items():
        module = model.get_submodule(where[path])
        own = vars(module).get("forward")
        if not isinstance(own, CompiledForward):
            vars(module)["forward"] = CompiledForward(module, options, own)


def compiled_forward_of(module: nn.Module) -> CompiledForward | None:
    """The forward of a block that is compiled by itself, with the graphs that it runs by now."""
    forward = forward_of(module)
    own = vars(module).get("forward") if forward is None else forward.own_forward()
    return own if isinstance(own, CompiledForward) else None


Opened = dict[nn.Module, tuple[CompiledForward | None, _SetAside | None]]
"""Modules that `open_blocks` changed, so that it can be done again."""


def snapshot_opened(model: nn.Module) -> Opened:
    """Modules of a model that `open_blocks` changed, also where strategies are around them."""
    found: Opened = {}
    for module in model.modules():
        forward = vars(module).get("forward")
        while isinstance(forward, Forward):
            forward = forward.instance_forward
        compiled = forward if isinstance(forward, CompiledForward) else None
        aside = vars(module).get(_NAME)
        if compiled is not None or aside is not None:
            found[module] = compiled, aside
    return found


def restore_opened(model: nn.Module, opened: Opened) -> None:
    """Have a model opened as it was at a snapshot; no strategy may be on its modules."""
    close_blocks(model)
    for module, (compiled, aside) in opened.items():
        if aside is not None:
            _set_aside(module)
        if compiled is not None:
            vars(module)["forward"] = compiled


def close_blocks(model: nn.Module) -> None:
    """Undo `open_blocks` and `set_aside_around`; no strategy may be on the blocks."""
    for module in model.modules():
        own = vars(module)
        forward, aside = own.get("forward"), own.pop(_NAME, None)
        if isinstance(forward, CompiledForward):
            if forward.own is None:
                del own["forward"]
            else:
                own["forward"] = forward.own
        if aside is not None:
            aside.put_back(module)
