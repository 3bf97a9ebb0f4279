"""Tells blocks apart: their class, parameters and inputs, and what they were set to.

What they were set to are the plain attributes of a block and of the modules in it: rates, strides,
names of activations. One that only numbers the blocks, such as `layer_idx`, is left out: it would
make every block one of its own.
"""

from typing import Any

from torch import nn

Traits = dict[tuple[str, str], Any]
"""Plain values, by the path of a module inside the block and the attribute's name."""


def traits_of(blocks: dict[str, nn.Module]) -> dict[str, Traits]:
    """The plain attributes of each block, by the block's path, without those that number them."""
    found = {path: _plain(block) for path, block in blocks.items()}
    alike: dict[tuple[type, str], list[str]] = {}
    for path, block in blocks.items():
        alike.setdefault((type(block), path.rpartition(".")[0]), []).append(path)
    for paths in alike.values():
        for key in [key for key in found[paths[0]] if _numbers(key, paths, found)]:
            for path in paths:
                del found[path][key]
    return found


def _plain(block: nn.Module) -> Traits:
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in sorted(vars(module).items())
        if _is_plain(value) and not name.startswith(_NOT_OWN)
    }


_NOT_OWN = ("_rekindle", "_fsdp", "_is_fsdp")
"""Beginnings of attributes that say how a block is run: by a plan, or sharded."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)


def _numbers(key: tuple[str, str], paths: list[str], found: dict[str, Traits]) -> bool:
    """Whether an attribute counts the blocks of a list, from 0 on or from another number.

    Two blocks with 1 and 2 are not counted by that: it may as well be a stride.
    """
    offsets = set()
    for path in paths:
        place, value = path.rpartition(".")[2], found[path].get(key)
        if not place.isdigit() or not isinstance(value, int) or isinstance(value, bool):
            return False
        offsets.add(value - int(place))
    return len(paths) > 1 and (offsets == {0} or (len(offsets) == 1 and len(paths) > 2))
