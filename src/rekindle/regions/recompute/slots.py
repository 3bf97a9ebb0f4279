"""The boxes that autograd holds in place of activations.

Note [A full slot is read without Python]. The hook that autograd calls to unpack a slot is an
`attrgetter`: it reads the slot's `value` without running any Python. A slot that has none falls
into `__getattr__`, and that is where a replay begins.
"""

import operator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rekindle.regions.errors.call_sites import RawSite
from rekindle.torch_private.autograd_graph import grad_fn_of
from rekindle.torch_private.dynamo_frames import not_compiled

if TYPE_CHECKING:
    from weakref import ref

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

_WORTH = 10**11
"""Multiplications of an op that is worth stopping for on a device: 0.2 ms or so."""
_PER_ELEMENT = 1000
"""Multiplications that take as long as moving one element through memory."""


class SlotTable:
    """The slots of one region in the order of saving, and the call site of each save.

    Slots belong to autograd: the table knows them weakly, and they die with their graph nodes.
    """

    __slots__ = ("sites", "slots")

    def __init__(self) -> None:
        self.slots: list[ref[Slot]] = []
        self.sites: list[RawSite] = []

    def __len__(self) -> int:
        return len(self.slots)

    def needed(self) -> int:
        """How many saves a replay has to make: up to the last one whose slot lives."""
        slots = self.slots
        count = len(slots)
        while slots[count - 1]() is None:
            count -= 1
        return count

    def any_dead(self) -> bool:
        """True if a slot was freed."""
        return None in [slot() for slot in self.slots]

    def release(self) -> None:
        """Take the activations out of all slots."""
        for weak in self.slots:
            slot = weak()
            if slot is not None:
                try:
                    del slot.value
                except AttributeError:
                    continue

    def stopping_pays(self, needed: int) -> bool:
        """True if the op that makes the last needed save has enough to do.

        Note [When stopping pays] in collect.py.
        """
        last = self.slots[needed - 1]()
        if last is None or last.meta[2].type == "cpu":
            return True
        slots = [self.slots[i]() for i in by_the_last_op(self.sites, needed)]
        shapes = [slot.meta[0] for slot in slots if slot is not None]
        work = max((shape.numel() for shape in shapes), default=0) * _PER_ELEMENT
        for i, a in enumerate(shapes):
            for j, b in enumerate(shapes):
                if i != j and len(a) >= 2 and len(b) == 2 and a[-1] == b[0]:
                    work = max(work, a.numel() * b[1])
        return work >= _WORTH


def by_the_last_op(sites: list[RawSite], count: int) -> range:
    """The last of the first `count` positions, and those before it from the same call site."""
    first = last = count - 1
    while first > 0 and sites[first - 1][:2] == sites[last][:2]:
        first -= 1
    return range(first, count)
