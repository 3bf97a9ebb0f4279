"""Offloaders: one for each owner and strategy, with a `DeviceOffloader` for each device."""

import os
import tempfile
from dataclasses import replace
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor

from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.eligibility import can_offload
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor
from rekindle.offload.tiers.base import Tier
from rekindle.offload.tiers.disk import DiskTier
from rekindle.offload.tiers.host import HostTier
from rekindle.offload.tiers.staged import StagedDiskTier
from rekindle.strategy import Offload
from rekindle.torch_private.dispatch_modes import is_traced
from rekindle.torch_private.dynamo_frames import not_compiled

_living: "WeakSet[Offloader]" = WeakSet()


class Offloader:
    """Offloads saved tensors for one owner by one strategy, on any device.

    It lives as long as its owner holds it, or a graph that has an activation of it.
    """

    def __init__(self, strategy: Offload, limit_in_flight: bool = True) -> None:
        self.strategy = strategy
        self._resolved = _resolve(strategy)
        self._min_bytes = 2**20 if strategy.min_bytes is None else strategy.min_bytes
        self.limit_in_flight = limit_in_flight
        """True if the device waits for copies so that few bytes are in flight; else copies take
        their time, as long as the forward lasts."""
        self._process = os.getpid()
        self.by_device: dict[torch.device, DeviceOffloader | None] = {}
        """None for a device from which the tier cannot be reached."""
        self._lock = Lock()
        _living.add(self)

    @not_compiled
    def pack(self, x: Tensor, exclusive: bool = False) -> OffloadedTensor | KeptTensor:
        """The pack hook: returns what autograd holds in the place of a tensor that it saves.

        `exclusive`: whoever saves it says that nobody else holds it, or is going to.
        """
        if is_traced():  # the graph is made of tensors, not of their bytes
            return KeptTensor(x)
        if can_offload(x, self._min_bytes) and os.getpid() == self._process:
            device = x.device
            offloader = self.by_device.get(device)
            if offloader is None and device not in self.by_device:
                with self._lock:
                    offloader = self.by_device.setdefault(device, self._make(device))
            if offloader is not None:
                return offloader.save(x, exclusive)
        return KeptTensor(x)

    def pause(self, failed: bool) -> None:
        """End a `with` block or a region: begin the copy-outs that waited for their owner."""
        for offloader in self._all():
            offloader.pause(failed)

    def on_backward_begin(self) -> None:
        """Finish copy-outs: backward begins, though it may use an activation only later."""
        for offloader in self._all():
            offloader.on_backward_begin()

    def trim(self) -> None:
        """Give back the memory, or the disk, that no activation uses."""
        for offloader in self._all():
            offloader.trim()

    def _all(self) -> list[DeviceOffloader]:
        return [found for found in list(self.by_device.values()) if found is not None]

    def _make(self, device: torch.device) -> DeviceOffloader | None:
        """Returns the offloader of a device; None if its tier cannot be reached from there."""
        strategy, tier = self._resolved, _tier_of(device, self._resolved)
        if tier is None:
            return None
        return DeviceOffloader(device, strategy, tier, self.limit_in_flight)


def _resolve(strategy: Offload) -> Offload:
    """Returns a strategy without open fields: with the folder for its file."""
    if strategy.tier == "disk" and strategy.directory is None:
        strategy = replace(strategy, directory=tempfile.gettempdir())
    return strategy


def _tier_of(device: torch.device, strategy: Offload) -> Tier | None:
    directory, max_bytes = strategy.directory, strategy.max_host_bytes
    if device.type == "cuda" and directory is None:
        return HostTier(device, max_bytes)
    if device.type == "cuda" and directory is not None:
        return StagedDiskTier(device, directory, max_bytes)
    if device.type == "cpu" and directory is not None:
        return DiskTier(directory)
    return None


def living_offloaders() -> list[Offloader]:
    """Returns the offloaders that there are in this process now."""
    return list(_living)
