"""Finds a model's blocks: the modules that repeat down it, such as transformer layers."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn

from rekindle.modules import patterns
from rekindle.modules.unwrapping import places, unwrapped

Named: TypeAlias = str | type[nn.Module] | Iterable[str | type[nn.Module]]
"""Modules as users name them: by patterns of their paths, by classes, or both."""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by their paths.

    These are the members of its lists of modules whose class occurs at least twice in the list, the
    outermost ones, where they have parameters. A model without any is one block itself.

    >>> from torch import nn
    >>> list(blocks_of(nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Linear(4, 4)] * 1))))
    ['']
    """
    found: dict[str, nn.Module] = {}
    _collect(model, "", found)
    return found or {"": model}


def unwrapped_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by their paths without wrappers: wrapping a model changes none.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    >>> list(unwrapped_blocks(nn.DataParallel(nn.Sequential(*blocks))))
    ['0', '1']
    """
    inner = unwrapped(model)
    paths: dict[int, str] = {}
    for path, place in places(inner).items():
        paths.setdefault(id(inner.get_submodule(place)), path)
    blocks = map(unwrapped, blocks_of(inner).values())
    return {paths[id(block)]: block for block in blocks}


def named_blocks(model: nn.Module, named: Named) -> dict[str, nn.Module]:
    """The blocks that a user names, by their paths without wrappers.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    >>> list(named_blocks(model, ["0", nn.Linear]))
    Traceback (most recent call last):
    ...
    ValueError: blocks= names '0' and '0.0', which is inside of it: name one of them
    >>> list(named_blocks(model, "*"))
    ['0', '1']
    """
    modules = {path: model.get_submodule(place) for path, place in places(model).items()}
    names: list[Any] = [named] if isinstance(named, str | type) else list(named)
    found: dict[str, nn.Module] = {}
    for name in names:
        found |= _named(modules, name)
    if not found:
        raise ValueError("blocks= names no module")
    first = {id(module): path for path, module in reversed(modules.items())}
    in_order = [path for path in modules if path in found and first[id(found[path])] == path]
    for path in in_order:
        for inner in in_order:
            if patterns.is_inside(inner, path):
                raise ValueError(
                    f"blocks= names {path!r} and {inner!r}, which is inside of it: name one of them"
                )
    return {path: found[path] for path in in_order}


def _named(modules: dict[str, nn.Module], name: Any) -> dict[str, nn.Module]:
    """The modules of one name."""
    if isinstance(name, str):
        found = {path: m for path, m in modules.items() if patterns.matches(path, name)}
        if not found:
            raise patterns.no_match(name, modules)
        called = {path: m for path, m in found.items() if not is_a_list(m)}
        if not called:
            raise patterns.names_a_list(name)
        return called
    if isinstance(name, type) and issubclass(name, nn.Module):
        found = {path: m for path, m in modules.items() if isinstance(m, name)}
        if not found:
            raise ValueError(f"No module of the model is a {name.__name__}")
        return found
    raise TypeError(f"blocks= takes patterns of paths and classes of modules, but got {name!r}")


def is_a_list(module: nn.Module) -> bool:
    """True for a list of modules that is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _collect(module: nn.Module, path: str, found: dict[str, nn.Module]) -> None:
    children = {
        f"{path}.{name}" if path else name: child
        for name, child in module._modules.items()
        if child is not None and not any(child is block for block in found.values())
    }
    if isinstance(module, _LISTS):
        kinds = Counter(type(child) for child in module._modules.values())
        blocks = {
            name: child
            for name, child in children.items()
            if kinds[type(child)] > 1 and is_a_block(child)
        }
        for name, child in blocks.items():
            if not any(child is block for block in found.values()):
                found[name] = child
        children = {name: child for name, child in children.items() if name not in blocks}
    for name, child in children.items():
        _collect(child, name, found)


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def is_a_block(module: nn.Module) -> bool:
    """True if a module is called, has parts, and learns: a lone linear layer is no block.

    A recurrent layer is one: it has no modules inside, and saves much at each step in time.
    """
    if is_a_list(module):
        return False
    has_parts = isinstance(module, nn.RNNBase) or any(True for _ in module.children())
    return has_parts and any(True for _ in module.parameters())
