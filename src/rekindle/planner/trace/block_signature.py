"""Keys that tell distinct blocks apart: class, parameters, inputs, settings, and ambient state.

A block's settings are the plain attributes of the block and of the modules in it: rates, strides,
names of activations. An attribute that only numbers the blocks, such as `layer_idx`, is left out:
it would make every block distinct.
"""

from typing import Any

from torch import nn

from rekindle.modules.unwrapping import class_name
from rekindle.planner.training_step import describe_leaf, describe_tree
from rekindle.planner.types import BlockKey
from rekindle.regions.recompute import ambient

Settings = dict[tuple[str, str], Any]
"""Plain values, by the path of a module inside the block and the attribute's name."""


def block_key(
    block: nn.Module, settings: Settings, call: tuple[Any, Any], around: ambient.Ambient
) -> BlockKey:
    """Return the key of a block that is called with some arguments in an ambient state."""
    shapes = [f"{name} {describe_leaf(p)}" for name, p in block.named_parameters()]
    values = [f"{path}.{name}={value!r}".lstrip(".") for (path, name), value in settings.items()]
    signature = f"{class_name(block)}({', '.join([*shapes, *values])}) of {describe_tree(call)}"
    return BlockKey(signature, str(around))


def settings_of(blocks: dict[str, nn.Module]) -> dict[str, Settings]:
    """Return the settings of each block, by the block's path."""
    found = {path: _plain_attributes(block) for path, block in blocks.items()}
    alike: dict[tuple[type, str], list[str]] = {}
    for path, block in blocks.items():
        alike.setdefault((type(block), path.rpartition(".")[0]), []).append(path)
    for paths in alike.values():
        for key in [key for key in found[paths[0]] if _numbers_blocks(key, paths, found)]:
            for path in paths:
                del found[path][key]
    return found


def _plain_attributes(block: nn.Module) -> Settings:
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in sorted(vars(module).items())
        if _is_plain(value) and not name.startswith(_NOT_SETTINGS)
    }


_NOT_SETTINGS = ("_rekindle", "_fsdp", "_is_fsdp")
"""Prefixes of attributes that say how a block is run: by a plan, or sharded."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str)


def _numbers_blocks(key: tuple[str, str], paths: list[str], found: dict[str, Settings]) -> bool:
    """Return whether an attribute counts the blocks of a list, from 0 on or from another number.

    Two blocks with 1 and 2 are not counted by that: it may as well be a stride.
    """
    offsets = set()
    for path in paths:
        place, value = path.rpartition(".")[2], found[path].get(key)
        if not place.isdigit() or not isinstance(value, int) or isinstance(value, bool):
            return False
        offsets.add(value - int(place))
    return len(paths) > 1 and (offsets == {0} or (len(offsets) == 1 and len(paths) > 2))
