"""Finds a model's blocks: the modules that repeat down it, such as transformer layers."""

from collections import Counter

from torch import nn

from rekindle.modules.unwrapping import places, unwrapped


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
            if kinds[type(child)] > 1 and _is_a_block(child)
        }
        for name, child in blocks.items():
            if not any(child is block for block in found.values()):
                found[name] = child
        children = {name: child for name, child in children.items() if name not in blocks}
    for name, child in children.items():
        _collect(child, name, found)


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _is_a_block(module: nn.Module) -> bool:
    """True if a module is called, has parts, and learns: a lone linear layer is no block."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    has_parts = any(True for _ in module.children())
    return has_parts and any(True for _ in module.parameters())
