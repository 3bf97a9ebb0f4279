"""Snapshots in the format of `torch.cuda.memory._snapshot()`, for torch's memory-snapshot page.

A snapshot has the storages that are alive at the end, in `segments`, and the events of one device
that led there, in `device_traces`: a storage is allocated, its free is requested, its free is done.
Frames, the innermost first, name what a storage is for; they have no function of Python's where a
plan is predicted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from rekindle.explanation.types import Allocation, Explanation
from rekindle.offload.tiers.arena import Arena, Lease, aligned
from rekindle.planner.plan import Plan
from rekindle.planner.step_walk import StepMoment, walk_step
from rekindle.planner.timeline import Timeline
from rekindle.planner.types import Profile

Json: TypeAlias = dict[str, Any]
_START = 0x7F00_0000_0000
"""The address of the first storage: where a GPU's memory may begin."""
_ALWAYS = "parameters, gradients, optimizer, batch"


def snapshot_of_explanation(found: Explanation) -> Json:
    """Return the storages of a recorded step, each with its op, module and line."""
    trace = _Trace()
    trace.have_always(found.static_bytes)
    alive: dict[int, _Storage] = {}
    events: dict[int, Allocation] = {}
    for each in found.allocations:
        events[each.made] = each
        if each.freed is not None:
            events[each.freed] = each
    for number, each in sorted(events.items()):
        if number == each.made:
            alive[each.made] = trace.allocate(each.nbytes, _frames(each, found.model), each.kind)
        else:
            trace.free(alive.pop(each.made))
    return trace.snapshot()


def _frames(each: Allocation, model: str) -> list[Json]:
    file, _, line = each.line.rpartition(":")
    frames = [_frame(f"{each.op} in {each.phase}", each.module or model)]
    if file:
        frames.append(_frame(each.function, file, int(line)))
    return frames


def snapshot_of_plan(profile: Profile, plan: Plan) -> Json:
    """Return the memory of a predicted step: what each moment has more, or less, than the last."""
    timeline = Timeline(profile.with_heads(plan.heads))
    walk = walk_step(timeline, [candidate for _, _, candidate in plan.blocks])
    trace = _Trace()
    trace.have_always(profile.static_bytes)
    levels = _Levels(trace)
    about = [f"{path or 'the model'}: {each.describe()}" for path, _, each in plan.blocks]
    for moment in walk.moments:
        levels.follow(moment, about[moment.place] if moment.place is not None else moment.at)
    for cause in ("own", "held", "cached", "moving", "outside"):
        levels.set(cause, 0, "the end", "the end")
    return trace.snapshot()


_CAUSES = {
    "outside": "made outside the blocks",
    "held": "held for the backward",
    "cached": "casts of weights",
    "moving": "on the link",
    "own": "in use",
}


class _Levels:
    """Bytes by cause, which go up and down; the last ones to come are the first to go."""

    def __init__(self, trace: "_Trace") -> None:
        self._trace = trace
        self._storages: dict[str, list[_Storage]] = {}

    def follow(self, moment: StepMoment, about: str) -> None:
        """Go from one moment of the step to another: first down, then up."""
        levels = [*zip(moment.memory._fields, moment.memory, strict=True)]
        self.set("own", 0, moment.at, about)
        levels.sort(key=lambda level: level[1] - self._now(level[0]))
        for cause, nbytes in levels:
            self.set(cause, nbytes, moment.at, about)

    def _now(self, cause: str) -> int:
        return sum(each.nbytes for each in self._storages.get(cause, ()))

    def set(self, cause: str, nbytes: int, at: str, about: str) -> None:
        """Have so many bytes of a cause."""
        there, word = self._storages.setdefault(cause, []), _CAUSES[cause]
        change = max(nbytes, 0) - self._now(cause)
        while change < 0:
            last = there.pop()
            self._trace.free(last)
            change += last.nbytes
        if change > 0:
            frames = [_frame(word, about), _frame("at", at)]
            there.append(self._trace.allocate(change, frames, word))


@dataclass(frozen=True)
class _Storage:
    lease: Lease
    nbytes: int
    frames: list[Json]
    category: str

    @property
    def address(self) -> int:
        return _START + self.lease.start


class _Trace:
    """The events of a device, and what is alive."""

    def __init__(self) -> None:
        self._arena = Arena(0)
        self._alive: dict[int, _Storage] = {}
        self._events: list[Json] = []

    def have_always(self, nbytes: int) -> None:
        """Have some bytes from before the first event on."""
        if nbytes > 0:
            self._place(nbytes, [_frame(_ALWAYS, "the model")], _ALWAYS)

    def allocate(self, nbytes: int, frames: list[Json], category: str) -> _Storage:
        storage = self._place(nbytes, frames, category)
        if nbytes:
            self._events.append({**self._event("alloc", storage), "category": category})
        return storage

    def free(self, storage: _Storage) -> None:
        if storage.nbytes:
            for action in ("free_requested", "free_completed"):
                self._events.append(self._event(action, storage))
            del self._alive[storage.address]

    def snapshot(self) -> Json:
        """All of it in torch's format."""
        blocks = list(self._blocks())
        allocated = sum(aligned(each.nbytes) for each in self._alive.values())
        segment = {
            "device": 0,
            "address": _START,
            "total_size": self._arena.size,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": sum(each.nbytes for each in self._alive.values()),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
        segments = [segment] if blocks else []
        return {"segments": segments, "device_traces": [self._events], "allocator_settings": {}}

    def _place(self, nbytes: int, frames: list[Json], category: str) -> _Storage:
        lease = self._arena.lease(nbytes) if nbytes else Lease(0, 0)
        if lease is None:
            self._arena.grow(self._arena.missing(nbytes))
            lease = self._arena.lease(nbytes)
        assert lease is not None, "there is room for it now"
        storage = _Storage(lease, nbytes, frames, category)
        if nbytes:
            self._alive[storage.address] = storage
        return storage

    def _event(self, action: str, storage: _Storage) -> Json:
        return {
            "action": action,
            "addr": storage.address,
            "size": storage.nbytes,
            "stream": 0,
            "time_us": len(self._events),
            "frames": storage.frames,
        }

    def _blocks(self) -> Iterator[Json]:
        """The blocks of the segment, with the gaps between them."""
        at = _START
        for address, storage in sorted(self._alive.items()):
            yield from _gap(at, address - at)
            size = aligned(storage.nbytes)
            block = _block(address, size, storage.nbytes, "active_allocated", storage.frames)
            yield {**block, "category": storage.category}
            at = address + size
        yield from _gap(at, _START + self._arena.size - at)


def _gap(address: int, size: int) -> Iterable[Json]:
    return [_block(address, size, 0, "inactive", [])] if size else []


def _block(address: int, size: int, nbytes: int, state: str, frames: list[Json]) -> Json:
    return {
        "address": address,
        "size": size,
        "requested_size": nbytes,
        "state": state,
        "frames": frames,
    }


def _frame(name: str, filename: str, line: int = 0) -> Json:
    return {"name": name, "filename": filename, "line": line}
