"""The host tier: copies on streams of their own, ordered by events; no thread waits.

Note [Who waits for whom]. Work on the device is ordered by its stream, not by when Python asked for
it, so every hand-over is an event. A copy out waits for the stream on which the activation was
saved. That stream waits for the copy before the activation is let go: from then on the allocator
may give its memory to the next kernel of that stream. If the memory belongs to another stream, the
allocator gets to know the one it was used on (`record_stream`, which does nothing in the usual
case) and waits for that. A copy in goes to memory of the stream that asks for it, waits for that
stream (an earlier kernel may still use the memory) and for the copy out; and whoever uses it, or
lets go of it, waits for the copy, or for the stream that did. Every wait is for work that was
issued before: no deadlock is possible.
"""

import torch
from torch import Tensor

from rekindle.offload.tiers.base import Copy, Tier
from rekindle.offload.tiers.pinned import PinnedPool, Room
from rekindle.torch_private.cuda import current_cuda_device, device_segments


class HostTier(Tier):
    """Pinned host memory, for one CUDA device."""

    waits_on_device = True

    def __init__(self, device: torch.device, max_bytes: int | None) -> None:
        self.device = device
        self.pool = PinnedPool(device, max_bytes)
        self.out_stream = torch.cuda.Stream(device)
        self.in_stream = torch.cuda.Stream(device)
        self.reads = 0
        self._timed_out: list[_Timing] = []
        self._timed_in: list[_Timing] = []
        self._is_timing = False

    def begin_copy_out(self, data: Tensor, saved_on: torch.cuda.Stream) -> "HostCopy | None":
        room = self.pool.reserve(data.numel())
        return None if room is None else HostCopy(self, room, data, saved_on)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def join(self, data: Tensor, made_at: torch.cuda.Stream) -> None:
        here = self.current_stream()
        if here != made_at:
            here.wait_stream(made_at)
            data.record_stream(here)

    @property
    def pool_bytes(self) -> int:
        return self.pool.size

    def trim(self) -> None:
        self.pool.trim()

    def watch_use(self) -> None:
        self.pool.watch_use()

    def shrink(self) -> None:
        self.pool.shrink()

    def growth(self) -> int:
        return self.pool_bytes + device_segments(self.device)

    def time_copies(self, enable: bool) -> None:
        if enable and not self._is_timing:
            self._timed_out, self._timed_in = [], []
        self._is_timing = enable

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        begin.synchronize()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def rates(self) -> tuple[float, float]:
        return self._rate(self._timed_out), self._rate(self._timed_in)

    def _rate(self, timings: "list[_Timing]") -> float:
        seconds = sum(self.seconds(timing.begin, timing.end) for timing in timings)
        return sum(timing.nbytes for timing in timings) / seconds if seconds else 0.0

    def timed(self, nbytes: int, inwards: bool) -> "_Timing | None":
        """Returns a timing for a copy that is about to be issued; None if copies are not timed."""
        if not self._is_timing:
            return None
        timing = _Timing(nbytes)
        (self._timed_in if inwards else self._timed_out).append(timing)
        return timing


class _Timing:
    """Events at the begin and the end of one copy on its stream."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)


class Outgoing:
    """A copy from the device to a room. Note [Who waits for whom]."""

    __slots__ = ("_saved_on", "sent")

    def __init__(
        self, tier: HostTier, room: Room, data: Tensor, saved_on: torch.cuda.Stream
    ) -> None:
        self._saved_on = saved_on
        data.record_stream(saved_on)
        tier.out_stream.wait_event(saved_on.record_event())
        if tier.pool.last_read is not None:
            tier.out_stream.wait_event(tier.pool.last_read[1])
        timing = tier.timed(data.numel(), inwards=False)
        self.sent = _copy(data, room.buffer, tier.out_stream, timing)

    def is_out(self) -> bool:
        return bool(self.sent.query())

    def wait_out(self) -> None:
        self._saved_on.wait_event(self.sent)


class Incoming:
    """A copy from a room to the device. Note [Who waits for whom]."""

    __slots__ = ("_data", "_home", "_there", "_tier")

    def __init__(self, tier: HostTier, room: Room, after: torch.cuda.Event | None) -> None:
        self._tier = tier
        self._home = torch.cuda.current_stream(tier.device)
        self._data: Tensor | None = torch.empty_like(room.buffer, device=tier.device)
        tier.in_stream.wait_event(self._home.record_event())
        if after is not None:
            tier.in_stream.wait_event(after)
        timing = tier.timed(self._data.numel(), inwards=True)
        self._there = _copy(room.buffer, self._data, tier.in_stream, timing)
        tier.reads += 1
        room.read = tier.reads, self._there

    def finish_return(self) -> Tensor:
        data, self._data = self._data, None
        assert data is not None, "it is taken once"
        here = torch.cuda.current_stream(self._tier.device)
        here.wait_event(self._there)
        if here != self._home:
            data.record_stream(here)
        return data

    def drop(self) -> None:
        if self._data is not None:
            self._home.wait_event(self._there)
            self._data = None


class HostCopy(Copy):
    """One activation in host memory."""

    __slots__ = ("_in", "_out", "_room", "_tier")

    def __init__(
        self, tier: HostTier, room: Room, data: Tensor, saved_on: torch.cuda.Stream
    ) -> None:
        self._tier = tier
        self._room: Room | None = room
        self._out = Outgoing(tier, room, data, saved_on)
        self._in: Incoming | None = None

    def is_out(self) -> bool:
        return self._out.is_out()

    def wait_out(self) -> None:
        self._out.wait_out()

    def begin_return(self) -> bool:
        if self._in is None:
            assert self._room is not None, "a copy that was closed is not asked for"
            self._in = Incoming(self._tier, self._room, self._out.sent)
        return True

    def finish_return(self) -> Tensor:
        assert self._in is not None, "begin_return comes first"
        data = self._in.finish_return()
        self._in = None
        return data

    def drop(self) -> None:
        if self._in is not None:
            self._in.drop()
            self._in = None

    def close(self) -> None:
        self.drop()
        if self._room is not None:
            self._tier.pool.give_back(self._room)
            self._room = None


def _copy(
    source: Tensor, target: Tensor, stream: torch.cuda.Stream, timing: "_Timing | None"
) -> torch.cuda.Event:
    """Issue a copy on a stream. Returns the event of its end."""
    home, device = torch.cuda.current_stream(stream.device), current_cuda_device()
    try:
        with torch.cuda.stream(stream):
            if timing is not None:
                timing.begin.record(stream)
            target.copy_(source, non_blocking=True)
            if timing is not None:
                timing.end.record(stream)
            done: torch.cuda.Event = stream.record_event()
            return done
    except BaseException:  # Note [Put back as often as asked]
        torch.cuda.set_stream(home)
        torch.cuda.set_device(device)
        raise
