"""A made-up device for tests: its clock and its links, a tier, and steps that run on it.

The device, its clock and its links are made up, so that everything is exact: a copy takes its bytes
over the rate of the link, an op takes the seconds it is told to. The tensors and autograd are real.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from rekindle.offload.activation import Activation
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.eligibility import can_offload
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor, unpack
from rekindle.offload.step_profile import StepProfile
from rekindle.offload.tiers.base import Copy, Tier
from rekindle.strategy import Offload

LITTLE = 1e-9
CPU = torch.device("cpu")


class MadeUpTier(Tier):
    """Two links, each serial, and a clock that only ops and waits move."""

    def __init__(
        self,
        out: float,
        back: float,
        *,
        on_device: bool = True,
        room: float = float("inf"),
        at_a_time: float = float("inf"),
        slow: Iterable[int] = (),
    ) -> None:
        self.waits_on_device = on_device
        self.out, self.back = out, back
        self.room = room
        self.at_a_time = at_a_time
        """How many fetched copies there can be, until they are taken."""
        self.slow = set(slow)
        """Those that take for ever to get out, while others overtake them."""
        self.now = self.waited = 0.0
        self.out_is_free_at = self.back_is_free_at = 0.0
        self.away = self.set_aside = self.used = self.coming = self.marks = 0
        self.sent: list[int] = []
        self.fetched: list[int] = []
        self.waited_for: list[int] = []
        self.timing: list[bool] = []
        self.shrunk_to: list[int] = []
        self.copies: list[ref[MadeUpCopy]] = []
        self.storages: list[tuple[int, StorageWeakRef]] = []
        self.peak = 0

    def begin_copy_out(self, data: Tensor, saved_on: object) -> "MadeUpCopy | None":
        if self.away + data.numel() > self.room:
            return None
        copy = MadeUpCopy(self, data)
        self.copies.append(ref(copy))
        return copy

    @property
    def pool_bytes(self) -> int:
        return self.set_aside

    def trim(self) -> None:
        pass

    def watch_use(self) -> None:
        self.used = self.away

    def shrink(self) -> None:
        self.shrunk_to.append(self.used)

    def time_copies(self, enable: bool) -> None:
        self.timing.append(enable)

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def rates(self) -> tuple[float, float]:
        return self.out, self.back

    def wait_until(self, moment: float) -> None:
        self.waited += max(0.0, moment - self.now)
        self.now = max(self.now, moment)

    def work(self, seconds: float) -> None:
        self.look()
        self.now += seconds
        for weak in self.copies:
            copy = weak()
            if copy is not None:
                copy.maybe_out()

    def hurry(self, name: int) -> None:
        """Let one that would take for ever be out now."""
        for copy in filter(None, [weak() for weak in self.copies]):
            if copy.name == name:
                copy.out_at = self.now

    def note(self, storage: torch.UntypedStorage) -> None:
        self.storages.append((storage.nbytes(), StorageWeakRef(storage)))

    def look(self) -> int:
        """The bytes of activations that are in memory now."""
        self.storages = [(n, weak) for n, weak in self.storages if not weak.expired()]
        here = sum({weak.cdata: n for n, weak in self.storages}.values())
        self.peak = max(self.peak, here)
        return here


class MadeUpCopy(Copy):
    """Some bytes of an activation whose floats are all the same number, its name."""

    def __init__(self, tier: MadeUpTier, data: Tensor) -> None:
        self.tier = tier
        self.bytes = data.clone()
        self.name = int(data[:4].view(torch.float32))
        self.let_go: Callable[[], None] | None = None
        tier.sent.append(self.name)
        tier.away += data.numel()
        tier.set_aside = max(tier.set_aside, tier.away)
        tier.used = max(tier.used, tier.away)
        tier.out_is_free_at = max(tier.out_is_free_at, tier.now) + data.numel() / tier.out
        self.out_at = 1e9 if self.name in tier.slow else tier.out_is_free_at
        self.back_at = 0.0
        self.coming: Tensor | None = None

    def maybe_out(self) -> None:
        """What a thread does in a tier that has any."""
        if not self.tier.waits_on_device and self.is_out() and self.let_go is not None:
            self.let_go()
            self.let_go = None

    def is_out(self) -> bool:
        return self.tier.now >= self.out_at

    def when_out(self, let_go: Callable[[], None]) -> None:
        self.let_go = let_go

    def wait_out(self) -> None:
        self.tier.waited_for.append(self.name)
        self.tier.wait_until(self.out_at)

    def begin_return(self) -> bool:
        if self.coming is None:
            if self.tier.coming + 1 > self.tier.at_a_time:
                return False
            self.begin()
        return True

    def begin(self) -> Tensor:
        tier = self.tier
        tier.coming += 1
        tier.fetched.append(self.name)
        self.coming = self.bytes.clone()
        tier.note(self.coming.untyped_storage())
        begin = max(tier.back_is_free_at, tier.now, self.out_at)
        self.back_at = tier.back_is_free_at = begin + self.bytes.numel() / tier.back
        return self.coming

    def finish_return(self) -> Tensor:
        data = self.begin() if self.coming is None else self.coming
        self.tier.wait_until(self.back_at)
        self.coming = None
        self.tier.coming -= 1
        return data

    def drop(self) -> None:
        if self.coming is not None:
            self.coming = None
            self.tier.coming -= 1

    def close(self) -> None:
        self.drop()
        self.tier.away -= self.bytes.numel()


class Work(torch.autograd.Function):
    """Takes some time forward and backward, saves its input, and makes an output of some bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: "Make", name: int, nbytes: int) -> Tensor:
        ctx.make = make
        ctx.expected = -1 if x.is_leaf else name - 1
        make.tier.work(make.forward)
        ctx.save_for_backward(x)
        return x.new_full((nbytes // 4,), float(name))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        make: Make = ctx.make
        if ctx.expected >= 0:
            make.used.append(ctx.expected)
            assert torch.equal(x, torch.full_like(x, float(ctx.expected)))
        if ctx.expected in make.fails_at:
            raise ZeroDivisionError
        make.tier.work(make.backward)
        return torch.zeros_like(x), None, None, None


@dataclass
class Make:
    """How the ops of a step behave."""

    tier: MadeUpTier
    forward: float
    backward: float
    fails_at: tuple[int, ...] = ()
    used: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What happened in one step, activations by their number in the order of saving."""

    sent: list[int]
    fetched: list[int]
    used: list[int]
    waited: float
    waited_for: list[int]
    peak: int
    marks: int
    hits: int
    misses: int


class Trainer:
    """Runs steps on a device offloader."""

    def __init__(
        self,
        quota: float | None = None,
        *,
        out: float = 8.0,
        back: float = 8.0,
        **tier: Any,
    ) -> None:
        self.tier = MadeUpTier(out, back, **tier)
        strategy = Offload("host", quota, 1, None, None, "keep", False)
        self.offloader = DeviceOffloader(CPU, strategy, self.tier)
        self.held: list[Tensor] = []
        self.moments: list[tuple[int, int]] = []
        """The bytes here and the ceiling, after every save and every use in a known step."""

    def pack(self, x: Tensor) -> OffloadedTensor | KeptTensor:
        if not can_offload(x, 1):
            return KeptTensor(x)
        self.tier.note(x.untyped_storage())
        saved = self.offloader.save(x)
        self.look()
        return saved

    def unpack(self, saved: OffloadedTensor | KeptTensor) -> Tensor:
        x = unpack(saved)
        self.look()
        return x

    def look(self) -> None:
        self.tier.look()
        step = self.offloader._step
        if step is not None and step.is_as_known and step.schedule is not None:
            self.moments.append((step.device_bytes, step.schedule.ceiling))

    def forward(
        self, sizes: Sequence[int], make: Make, hold: Iterable[int] = (), start: int = 0
    ) -> Tensor:
        """Activations of these sizes, and a last one that is not saved."""
        held = set(hold)
        x = torch.zeros(1, requires_grad=True)
        with saved_tensors_hooks(self.pack, self.unpack):
            for name, nbytes in enumerate([*sizes, 4], start):
                x = Work.apply(x, make, name, nbytes)  # type: ignore[no-untyped-call]
                if name in held:
                    self.held.append(x.detach())
        return x

    def step(
        self,
        sizes: Sequence[int],
        *,
        forward: float = 1.0,
        backward: float = 2.0,
        before_turn: float = 0.0,
        hold: Iterable[int] = (),
        fails_at: tuple[int, ...] = (),
        goes_backward: bool = True,
        branches: int = 1,
    ) -> Report:
        """One step. With branches, the first of them goes backward first."""
        tier = self.tier
        tier.sent, tier.fetched, tier.waited_for = [], [], []
        tier.peak = tier.marks = 0
        waited = tier.waited
        make = Make(tier, forward, backward, fails_at)
        with rekindle.observe() as seen:
            outs = [
                self.forward(sizes, make, hold, start=branch * len(sizes))
                for branch in range(branches)
            ]
            self.offloader.pause(failed=False)
            tier.work(before_turn)
            if goes_backward:
                for out in outs:
                    out.backward()
        self.held.clear()
        del outs
        return Report(
            list(tier.sent),
            list(tier.fetched),
            make.used,
            tier.waited - waited,
            list(tier.waited_for),
            tier.peak,
            tier.marks,
            seen.offload.prefetch_hits,
            seen.offload.prefetch_misses,
        )

    def steps(self, count: int, sizes: Sequence[int], **how: Any) -> list[Report]:
        return [self.step(sizes, **how) for _ in range(count)]

    def activation(self, index: int) -> Activation:
        """One of the step that is being saved."""
        assert self.offloader._step is not None
        activation = self.offloader._step.activations[index]()
        assert activation is not None
        return activation

    @property
    def known(self) -> list[StepProfile]:
        """What is known of the steps that are over."""
        self.step([4])  # a step is learnt from when the next one begins
        return [profile for profile in self.offloader._learned.known if len(profile.sizes) > 1]


TEN = [8] * 10
