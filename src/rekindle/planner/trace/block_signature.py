"""Keys that tell distinct blocks apart: class, parameters, inputs, ambient state, and ops.

Attributes of a block are no part of its key. Those that change what it costs change the ops that it
runs or the shapes of their results; those that only number blocks, or are rates, do not.
"""

import re
from typing import Any

from torch import nn

from rekindle.modules.unwrapping import class_name
from rekindle.planner.nested_tensors import tensors_in_objects
from rekindle.planner.training_step import describe_leaf, describe_tree
from rekindle.planner.types import BlockKey
from rekindle.regions.recompute import ambient


def block_key(
    block: nn.Module, call: tuple[Any, Any], around: ambient.Ambient, ops: str
) -> BlockKey:
    """Return the key of a block's call: its arguments, the ambient state, the digest of its ops."""
    shapes = ", ".join(f"{name} {describe_leaf(p)}" for name, p in block.named_parameters())
    signature = f"{class_name(block)}({shapes}) of {describe_tree(call)}"
    inside = tensors_in_objects(call)
    if inside:
        signature += f" with {', '.join(map(describe_leaf, inside))}"
    return BlockKey(signature, str(around), ops)


def has_signature(known: str, signature: str) -> bool:
    """Return whether the signature of a block in a profile is that of a block.

    Before version 7 of profiles, attributes of the block stood after its parameters.
    """
    block, _, inputs = signature.partition(_OF)
    end = f"{_OF}{inputs}"
    if not known.endswith(end):
        return False
    rest = known.removesuffix(end)
    if not rest.startswith(block):
        return False
    return rest == block or _ATTRIBUTE.match(rest.removeprefix(block)) is not None


_OF = ") of "
_ATTRIBUTE = re.compile(r"(, )?[\w.]+=")
