"""The box that autograd holds in place of an activation.

Note [A full slot is read without Python]. The hook that autograd calls to unpack a slot is an
`attrgetter`: it reads the slot's `value` without running any Python. A slot that has none falls
into `__getattr__`, and that is where a replay begins.
"""

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rekindle.torch_private.autograd_graph import grad_fn_of
from rekindle.torch_private.dynamo_frames import not_compiled

if TYPE_CHECKING:
    from rekindle.regions.recompute.recompute_region import RecomputeRegion


class Slot:
    """The box that autograd holds in place of one activation."""

    __slots__ = ("__weakref__", "meta", "region", "value", "version")

    region: "RecomputeRegion"
    meta: tuple[torch.Size, torch.dtype, torch.device]
    version: int
    """The activation's version when it was saved."""
    value: Tensor

    @not_compiled
    def __getattr__(self, name: str) -> Tensor:
        if name == "value":
            return self.region.fill(self)
        raise AttributeError(name)


def filled(x: Tensor) -> Slot:
    """A slot that belongs to no region, and has its value for good."""
    slot = Slot()
    slot.value = x if grad_fn_of(x) is None else x.detach()  # else it may hold who holds it
    return slot


unpack = operator.attrgetter("value")
"""Note [A full slot is read without Python]."""
read_value = Slot.__dict__["value"].__get__
"""A slot's value, or AttributeError: does not fall into `__getattr__`."""
