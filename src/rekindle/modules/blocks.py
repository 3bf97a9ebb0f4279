"""Finds a model's blocks: the modules that repeat down it, such as transformer layers."""

from collections import Counter

from torch import nn


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


def _collect(module: nn.Module, path: str, found: dict[str, nn.Module]) -> None:
    children = [(f"{path}.{name}" if path else name, child) for name, child in _children(module)]
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        kinds = Counter(type(child) for _, child in children)
        blocks = {
            name: child for name, child in children if kinds[type(child)] > 1 and _is_a_block(child)
        }
        found.update(blocks)
        children = [(name, child) for name, child in children if name not in blocks]
    for name, child in children:
        _collect(child, name, found)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if child is not None]


def _is_a_block(module: nn.Module) -> bool:
    """Whether it does more than one thing, and learns: a lone linear layer is no block."""
    has_parts = any(True for _ in module.children())
    return has_parts and any(True for _ in module.parameters())
