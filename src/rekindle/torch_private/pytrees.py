"""Nested containers of tensors, as torch itself takes them apart.

A container that a user registers with torch's `_pytree` is one here as well.
"""

from torch.utils import _pytree

tree_leaves = _pytree.tree_leaves
"""The values in nested containers, in order.

Tried on torch 2.11 and 2.13. Goes when pytrees are public, as pytorch/pytorch#65761 asks."""

tree_map = _pytree.tree_map
"""Nested containers of the same kinds, with a function of each value.

Tried on torch 2.11 and 2.13. Goes when `tree_leaves` does."""

tree_flatten = _pytree.tree_flatten
"""The values in nested containers, and a description of the containers.

Tried on torch 2.11 and 2.13. Goes when `tree_leaves` does."""

SUPPORTED_NODES = _pytree.SUPPORTED_NODES
"""The classes of containers that torch takes apart, each with its functions.

Tried on torch 2.11 and 2.13. Goes when torch's public module lists them."""
