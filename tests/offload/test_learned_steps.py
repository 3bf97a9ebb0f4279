"""A device offloader learns a step in two runs, and from then on does what it chose.

The device, its clock and its links are made up, so that everything is exact: a copy takes its bytes
over the rate of the link, an op takes the seconds it is told to. The tensors and autograd are real.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import rekindle
from rekindle.offload.activation import Activation
from rekindle.offload.device_offloader import DeviceOffloader
from rekindle.offload.eligibility import can_offload
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor, unpack
from rekindle.offload.schedule import ActivationTimes
from rekindle.offload.step_profile import (
    StepProfile,
    StepRecord,
    make_profile,
    profile_of_first,
    profile_of_repeat,
)
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

    def send(self, data: Tensor, saved_on: object) -> "MadeUpCopy | None":
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

    def fetch(self) -> bool:
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

    def take(self) -> Tensor:
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


# What is learnt when


def test_of_a_step_nothing_is_known_in_its_first_run() -> None:
    trainer = Trainer()
    trainer.step(TEN)
    assert trainer.offloader._learned.known == []


def test_after_the_first_run_the_order_is_known() -> None:
    trainer = Trainer()
    trainer.step(TEN)
    (profile,) = trainer.known
    assert profile.sizes == tuple(TEN)
    assert profile.order == tuple(reversed(range(10)))
    assert not profile.is_timed


def test_after_the_second_run_the_times_are_known() -> None:
    trainer = Trainer()
    trainer.steps(2, TEN)
    (profile,) = trainer.known
    assert profile.is_timed


def test_the_second_run_is_timed_and_the_third_to_check_it() -> None:
    trainer = Trainer()
    for _ in range(4):
        trainer.step(TEN)
    assert trainer.tier.timing == [False, True, True, False]


def test_what_is_timed_is_every_save_and_every_use() -> None:
    trainer = Trainer(out=1000.0, back=1000.0)
    trainer.steps(2, TEN)
    record = trainer.offloader._step.record if trainer.offloader._step else StepRecord()
    times = record.times(trainer.tier)
    saved = [times[record.saved[i]] for i in range(10)]
    used = [times[record.used[i]] for i in reversed(range(10))]
    assert saved == pytest.approx([float(i) for i in range(10)])
    assert used == pytest.approx([9.0 + 2 * i for i in range(10)])


def test_times_leave_out_what_the_device_waited() -> None:
    trainer = Trainer(out=1.0, back=1.0)
    trainer.step(TEN)
    assert trainer.step(TEN).waited > 10
    record = trainer.offloader._step.record if trainer.offloader._step else StepRecord()
    times = record.times(trainer.tier)
    assert [times[record.saved[i]] for i in range(10)] == pytest.approx(list(range(10)))
    assert [times[record.used[9 - i]] for i in range(10)] == pytest.approx(
        [9.0 + 2 * i for i in range(10)]
    )


def test_auto_sends_all_it_may_twice_and_from_then_on_what_is_free() -> None:
    # Nine seconds from the first save to the first use, at 0.95 * 4 bytes a second: four of eight.
    sent = [report.sent for report in Trainer(out=4.0).steps(5, TEN)]
    everything, free = list(range(8)), list(range(4))
    assert sent == [everything, everything, free, free, free]


def test_auto_does_not_wait_once_times_are_known() -> None:
    waited = [report.waited for report in Trainer(out=4.0, back=4.0).steps(5, TEN)]
    assert waited[2:] == [0.0, 0.0, 0.0]


def test_auto_does_not_wait_for_copies_when_the_loss_is_computed_outside() -> None:
    # The copies have the time of the loss as well: they are needed out when backward begins.
    trainer = Trainer(out=4.0, back=4.0)
    waited = [report.waited for report in trainer.steps(4, TEN, before_turn=8.0)]
    assert waited[2:] == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([4, 8, 12, 16, 40]), min_size=3, max_size=12),
    st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0, 100.0]),
    st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0, 100.0]),
)
def test_auto_never_waits_whatever_the_sizes_and_the_links(
    sizes: list[int], out: float, back: float
) -> None:
    reports = Trainer(out=out, back=back).steps(4, sizes)
    assert reports[3].waited <= LITTLE
    assert reports[3].misses == 0


def test_in_the_first_run_backward_is_expected_to_go_in_reverse() -> None:
    report = Trainer(quota=1.0).step(TEN)
    assert report.fetched == report.used[2:] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert (report.hits, report.misses) == (8, 0)


def test_from_the_second_run_on_backward_is_expected_in_its_own_order() -> None:
    # Two branches of five, and the first goes backward first. When it ends, 9 is on its way for the
    # second; it is dropped, and asked for again when the second begins with it.
    reports = Trainer(quota=1.0, out=100.0, back=100.0).steps(4, [8] * 5, branches=2)
    assert [report.fetched for report in reports[1:]] == [[2, 1, 0, 9, 9, 8, 7, 6, 5]] * 3
    assert [(report.hits, report.misses) for report in reports[1:]] == [(7, 1)] * 3


@pytest.mark.parametrize("quota", [None, 0.5, 1.0, 40])
def test_a_known_step_fetches_what_it_sent_in_the_order_of_use(quota: float | None) -> None:
    report = Trainer(quota).steps(3, TEN)[-1]
    assert report.fetched == list(reversed(report.sent))
    assert (report.hits, report.misses) == (len(report.sent), 0)


def test_once_it_is_checked_every_run_is_the_same() -> None:
    # The second run sends more than the first, so that only the third tells times.
    reports = Trainer(out=4.0, back=3.0).steps(7, [8, 16, 4, 40, 8, 12, 8, 24, 8, 4])
    assert [report.waited for report in reports[3:]] == [0.0] * 4
    assert reports[4] == reports[5] == reports[6]


def test_a_choice_that_makes_the_device_wait_after_all_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(out=4.0)
    rates = chain([(100.0, 100.0)], repeat(trainer.tier.rates()))  # wrong the first time
    monkeypatch.setattr(trainer.tier, "rates", lambda: next(rates))
    trainer.steps(2, TEN)
    reports = trainer.steps(5, TEN)
    assert reports[0].waited > 0
    assert [report.waited for report in reports[1:]] == [0.0] * 4


def test_a_run_in_which_memory_was_set_aside_tells_no_times() -> None:
    trainer = Trainer(out=4.0)
    trainer.step(TEN)
    trainer.tier.set_aside = 0  # so that the second run sets it aside once more
    trainer.step(TEN)
    assert [profile.is_timed for profile in trainer.known] == [False]
    trainer.step(TEN)
    assert [profile.is_timed for profile in trainer.known] == [True]


def test_what_was_set_aside_shrinks_to_what_is_sent_once_times_are_known() -> None:
    trainer = Trainer(out=4.0)
    trainer.steps(4, TEN)
    assert trainer.tier.shrunk_to == [32]


# Several steps


def test_two_models_in_turn_are_both_learnt() -> None:
    trainer = Trainer(out=4.0)
    a, b = [8] * 10, [16] * 6
    sent = [(trainer.step(a).sent, trainer.step(b).sent) for _ in range(5)]
    assert sent[3:] == [([0, 1, 2, 3], [0]), ([0, 1, 2, 3], [0])]


def test_two_models_in_turn_never_wait_or_miss_once_learnt() -> None:
    trainer = Trainer(out=4.0)
    for _ in range(3):
        trainer.step([8] * 10)
        trainer.step([16] * 6)
    reports = [trainer.step([8] * 10), trainer.step([16] * 6)]
    assert [(r.waited, r.misses) for r in reports] == [(0.0, 0), (0.0, 0)]


def after_a_longer_one() -> Report:
    """A step that begins like a longer one, which came just before; both are known."""
    trainer = Trainer(out=4.0)
    for _ in range(4):
        trainer.step([8] * 20)
        trainer.step([8] * 10)
    trainer.step([8] * 20)
    report = trainer.step([8] * 10)
    assert sorted((len(h.sizes), h.is_timed) for h in trainer.known) == [(10, True), (20, True)]
    return report


def test_a_step_that_begins_like_the_last_one_sends_what_that_one_would() -> None:
    # Nineteen seconds at 0.95 * 4 bytes a second: nine of eight, of the longer one.
    assert after_a_longer_one().sent == list(range(9))


def test_a_step_that_begins_like_the_last_one_comes_back_in_its_own_order() -> None:
    report = after_a_longer_one()
    assert report.fetched == list(reversed(report.sent))
    assert (report.hits, report.misses) == (9, 0)


def test_a_new_shape_sends_the_share_that_was_chosen_last() -> None:
    trainer = Trainer(out=4.0)
    trainer.steps(4, [8] * 10)  # four of ten are free
    report = trainer.step([4] * 22)  # the last two are kept in any case
    assert len(report.sent) == 8


def test_a_new_shape_is_learnt_beside_the_old_one() -> None:
    trainer = Trainer(out=4.0)
    trainer.steps(3, TEN)
    trainer.steps(3, [4] * 10)
    trainer.step(TEN)
    assert sorted((h.sizes[0], h.is_timed) for h in trainer.known) == [(4, True), (8, True)]


def test_after_a_shape_that_is_seen_once_no_more_than_eight_steps_are_timed() -> None:
    trainer = Trainer(out=4.0)
    trainer.steps(3, TEN)
    trainer.step([4] * 7)  # the last batch of an epoch
    trainer.tier.timing.clear()
    trainer.steps(12, TEN)
    assert trainer.tier.timing == [True] * 8 + [False] * 4


def test_auto_learns_the_link_where_every_step_has_another_shape() -> None:
    trainer = Trainer(out=1.0, back=1.0)
    reports = [trainer.step([4 * length] * 10) for length in range(2, 22)]
    plain = 8 + 10 * 2.0
    assert reports[-1].waited < plain


def test_no_more_than_sixteen_steps_are_remembered() -> None:
    trainer = Trainer(out=4.0)
    for length in range(3, 30):
        trainer.step([8] * length)
    assert len(trainer.offloader._learned.known) == 16


def test_several_forwards_before_one_backward_are_one_step() -> None:
    trainer = Trainer(quota=1.0)
    trainer.step([8] * 5, branches=2)
    (profile,) = trainer.known
    assert len(profile.sizes) == 10


def test_a_step_with_retain_graph_is_learnt_once_its_graph_is_gone() -> None:
    trainer = Trainer(quota=1.0)
    make = Make(trainer.tier, 1.0, 2.0)
    out = trainer.forward(TEN, make)
    out.backward(retain_graph=True)
    out.backward(retain_graph=True)
    assert trainer.known == []
    del out
    trainer.step(TEN)
    (profile,) = trainer.known
    assert profile.order == tuple(reversed(range(10)))


def test_after_a_backward_that_keeps_the_graph_what_was_fetched_is_let_go() -> None:
    trainer = Trainer(quota=1.0)
    trainer.steps(3, TEN)
    make = Make(trainer.tier, 1.0, 2.0)
    out = trainer.forward(TEN, make)
    trainer.offloader.pause(failed=False)
    assert trainer.tier.look() == 16
    out.backward(retain_graph=True)
    assert trainer.tier.look() == 16
    out.backward()
    assert trainer.tier.look() == 0
    assert make.used == [*reversed(range(10)), *reversed(range(10))]


# What somebody holds


def test_what_somebody_holds_is_sent_once_and_never_again() -> None:
    sent = [report.sent for report in Trainer(quota=1.0).steps(4, TEN, hold=[3])]
    everything = list(range(8))
    assert sent == [everything, *[[0, 1, 2, 4, 5, 6, 7]] * 3]


def test_what_somebody_holds_is_not_fetched_once_that_is_known() -> None:
    report = Trainer(quota=1.0).steps(2, TEN, hold=[3])[-1]
    assert report.fetched == [7, 6, 5, 4, 2, 1, 0]


def test_what_somebody_holds_later_is_not_sent_any_more() -> None:
    trainer = Trainer(quota=1.0)
    trainer.steps(4, TEN)
    trainer.step(TEN, hold=[3])
    assert trainer.step(TEN, hold=[3]).sent == [0, 1, 2, 4, 5, 6, 7]


def test_what_somebody_holds_later_raises_the_ceiling_by_its_bytes() -> None:
    entries = [ActivationTimes(8)] * 10
    profile = make_profile(entries, list(reversed(range(10))), 1.0, None, is_timed=True)
    assert (profile.schedule.ceiling, profile.with_staying({3}).schedule.ceiling) == (16, 24)


def test_what_somebody_holds_later_makes_nobody_wait() -> None:
    trainer = Trainer(quota=1.0, out=100.0, back=100.0)
    assert trainer.steps(4, TEN)[-1].waited == 0
    trainer.step(TEN, hold=[0, 1])
    report = trainer.step(TEN, hold=[0, 1])
    assert (report.waited, report.misses) == (0.0, 0)


def test_a_share_is_used_up_although_somebody_holds_some() -> None:
    # Half of the eight that can be moved: four, found after the held ones were.
    reports = Trainer(quota=0.5).steps(6, TEN, hold=[0, 1])
    assert reports[-1].sent == [2, 3, 4, 5]


# Memory


@pytest.mark.parametrize("quota", [None, 0.0, 0.3, 0.5, 1.0, 24])
@pytest.mark.parametrize("rate", [1.0, 4.0, 100.0])
def test_a_known_step_is_never_above_its_ceiling(quota: float | None, rate: float) -> None:
    trainer = Trainer(quota, out=rate, back=rate)
    trainer.steps(2, TEN)
    trainer.moments.clear()
    trainer.steps(3, TEN)
    assert [here for here, ceiling in trainer.moments if here > ceiling] == []


@pytest.mark.parametrize(("quota", "peak"), [(0, 80), (16, 64), (24, 56), (0.5, 40), (1.0, 16)])
def test_the_peak_of_a_known_step_is_what_stays(quota: float, peak: int) -> None:
    trainer = Trainer(quota, out=4.0, back=4.0)
    trainer.steps(2, TEN)
    # What an op is about to make is counted when it is saved.
    assert {report.peak for report in trainer.steps(3, TEN)} == {peak}


def test_the_peak_does_not_depend_on_how_slow_the_link_is() -> None:
    peaks = {Trainer(0.5, out=rate, back=rate).steps(4, TEN)[-1].peak for rate in (0.1, 1.0, 4.0)}
    assert peaks == {40}


def test_what_the_lane_counts_as_here_is_what_is_here() -> None:
    trainer = Trainer(quota=0.5, out=4.0, back=2.0)
    counted = []

    class Looking(MadeUpTier):
        def look(self) -> int:
            here = super().look()
            step = trainer.offloader._step
            if step is not None and not trainer.offloader.died:
                counted.append((step.device_bytes, here))
            return here

    trainer.tier.__class__ = Looking
    trainer.steps(4, [8, 4, 16, 8, 40, 4, 8, 8, 16, 12])
    assert counted
    assert [pair for pair in counted if pair[0] != pair[1]] == []


def test_nothing_is_here_or_away_when_all_is_over() -> None:
    trainer = Trainer(quota=1.0)
    trainer.steps(3, TEN)
    trainer.offloader._settle()
    assert (trainer.tier.look(), trainer.tier.away) == (0, 0)
    assert trainer.offloader._step is not None
    assert trainer.offloader._step.device_bytes == 0


def test_the_device_waits_for_a_copy_out_only_above_the_ceiling() -> None:
    # All are sent but two may be here: a copy of two seconds in a second of work.
    trainer = Trainer(quota=1.0, out=4.0, back=100.0)
    report = trainer.steps(4, TEN)[-1]
    # The first is out when the third is saved; from then on each save waits for the one two before.
    assert report.waited_for == list(range(1, 8))
    assert report.waited == pytest.approx(8 * 2 - 9)


def test_no_device_waits_for_a_copy_out_below_the_ceiling() -> None:
    trainer = Trainer(quota=16, out=4.0, back=100.0)
    report = trainer.steps(4, TEN)[-1]
    assert report.sent == [0, 1]
    assert report.waited_for == []


def test_in_an_unknown_step_no_more_than_the_lead_is_leaving() -> None:
    report = Trainer(quota=1.0, out=1.0, back=100.0).step(TEN)
    assert report.peak <= 16 + 16 + 8


def test_a_quota_in_bytes_holds_for_a_step_that_turns_out_to_be_another() -> None:
    trainer = Trainer(quota=16, out=100.0, back=100.0)
    trainer.steps(3, TEN)
    sizes = [8] * 5 + [4] * 10
    report = trainer.step(sizes)
    assert sum(sizes[i] for i in report.sent) <= 16


def test_a_quota_in_bytes_holds_for_every_step() -> None:
    trainer = Trainer(quota=24)
    assert [sum(TEN[i] for i in r.sent) for r in trainer.steps(4, TEN)] == [24, 24, 24, 24]


# Where the tier says no


@pytest.mark.filterwarnings("ignore:rekindle.offload. There is no room")
def test_a_tier_without_room_for_all_makes_nobody_wait() -> None:
    # There is room for six of the eight that would go; the links are fast enough for all.
    trainer = Trainer(quota=1.0, out=100.0, back=100.0, room=48)
    report = trainer.steps(5, TEN)[-1]
    assert len(report.sent) == 6
    assert (report.waited, report.misses) == (0.0, 0)


def test_what_is_wanted_comes_although_something_else_takes_all_the_room_to_come() -> None:
    # One at a time comes back, and the first run expects another order than backward has.
    trainer = Trainer(quota=1.0, out=100.0, back=100.0, at_a_time=1)
    out = trainer.forward(TEN, Make(trainer.tier, 1.0, 2.0))
    trainer.offloader.pause(failed=False)
    trainer.offloader.load(trainer.activation(9))
    trainer.offloader.load(trainer.activation(8))
    assert trainer.tier.fetched == [7]
    found = trainer.offloader.load(trainer.activation(3))
    assert found.view(torch.float32).tolist() == [3.0, 3.0]
    assert trainer.tier.fetched == [7, 3]
    del out


def test_where_one_at_a_time_comes_back_a_known_step_gets_all() -> None:
    trainer = Trainer(quota=1.0, out=100.0, back=100.0, at_a_time=1)
    report = trainer.steps(4, TEN)[-1]
    assert report.fetched == [7, 6, 5, 4, 3, 2, 1, 0]


# Steps that do not end


def test_a_graph_that_is_thrown_away_is_not_learnt_from() -> None:
    trainer = Trainer(quota=1.0)
    trainer.step(TEN, goes_backward=False)
    assert trainer.known == []


def test_a_graph_that_is_thrown_away_leaves_nothing_behind() -> None:
    trainer = Trainer(quota=1.0)
    trainer.step(TEN, goes_backward=False)
    trainer.offloader._settle()
    assert (trainer.tier.look(), trainer.tier.away) == (0, 0)


def test_what_follows_a_graph_that_is_thrown_away_begins_a_new_step() -> None:
    trainer = Trainer(quota=1.0)
    trainer.steps(3, TEN)
    trainer.step(TEN, goes_backward=False)
    report = trainer.step(TEN)
    assert (len(report.sent), report.misses) == (8, 0)


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    trainer = Trainer(quota=1.0)
    trainer.steps(3, TEN)
    with pytest.raises(ZeroDivisionError):
        trainer.step(TEN, fails_at=(5,))
    trainer.offloader._settle()
    assert (trainer.tier.look(), trainer.tier.away) == (0, 0)


def test_a_backward_that_fails_does_not_change_what_is_known() -> None:
    trainer = Trainer(out=4.0, back=4.0)
    before = trainer.steps(4, TEN)[-1]
    with pytest.raises(ZeroDivisionError):
        trainer.step(TEN, fails_at=(5,))
    assert trainer.step(TEN) == before


@pytest.mark.parametrize("run", [0, 1])
def test_a_backward_that_fails_while_a_step_is_learnt_is_not_taken_for_the_whole(run: int) -> None:
    trainer = Trainer(quota=1.0, out=100.0, back=100.0)
    trainer.steps(run, TEN)
    with pytest.raises(ZeroDivisionError):
        trainer.step(TEN, fails_at=(5,))
    report = trainer.steps(4, TEN)[-1]
    assert (report.hits, report.misses) == (8, 0)


def test_a_forward_that_fails_does_not_disturb_the_next_step() -> None:
    trainer = Trainer(out=4.0, back=4.0)
    before = trainer.steps(4, TEN)[-1]
    trainer.forward(TEN[:5], Make(trainer.tier, 1.0, 2.0))
    trainer.offloader.pause(failed=True)
    assert trainer.step(TEN) == before


# A tier whose waits are the caller's


def test_what_is_let_go_behind_a_slower_copy_is_counted_right() -> None:
    trainer = Trainer(quota=1.0, out=1.0, back=100.0, on_device=False)
    trainer.steps(3, TEN)
    trainer.tier.work(1000.0)
    trainer.offloader._settle()
    assert trainer.offloader._step is not None
    assert trainer.offloader._step.device_bytes == 0


def test_what_overtakes_a_slower_copy_out_is_fetched_once() -> None:
    # Several threads write at a time: a later one may be done first, and used while one is not.
    trainer = Trainer(quota=1.0, out=1000.0, back=1000.0, on_device=False, slow=[0])
    out = trainer.forward([8] * 4, Make(trainer.tier, 1.0, 2.0))
    trainer.tier.work(1.0)
    assert trainer.tier.sent == [0, 1]
    second = trainer.activation(1)
    assert second.data is None
    found = trainer.offloader.load(second)
    trainer.tier.hurry(0)
    assert trainer.offloader.load(second).data_ptr() == found.data_ptr()
    assert trainer.tier.fetched.count(1) == 1
    del out


def test_what_overtakes_a_slower_copy_out_is_counted_right() -> None:
    trainer = Trainer(quota=1.0, out=1000.0, back=1000.0, on_device=False, slow=[0])
    out = trainer.forward([8] * 4, Make(trainer.tier, 1.0, 2.0))
    trainer.tier.work(1.0)
    assert trainer.tier.sent == [0, 1]
    step = trainer.offloader._step
    assert step is not None
    trainer.offloader.load(trainer.activation(1))
    trainer.tier.hurry(0)
    trainer.offloader._settle()
    assert step.device_bytes == trainer.tier.look()
    del out
    trainer.offloader._settle()
    assert step.device_bytes == trainer.tier.look() == 0


def test_what_is_still_leaving_when_it_is_asked_back_is_there_at_its_use() -> None:
    # Asked back while still here, it is let go a moment later, and missing when it is used.
    trainer = Trainer(quota=1.0, out=2.0, back=100.0, on_device=False)
    assert [report.misses for report in trainer.steps(4, TEN)] == [0, 0, 0, 0]


def test_a_caller_who_waits_gets_every_activation_back() -> None:
    report = Trainer(quota=1.0, out=0.5, back=0.5, on_device=False).steps(4, TEN)[-1]
    assert report.used == list(reversed(range(10)))


# What learning makes of a record


def diary_of(tier: MadeUpTier, order: Sequence[int], stays: Iterable[int] = ()) -> StepRecord:
    record = StepRecord(stays=set(stays))
    for i in range(10):
        record.note_saved(i, tier)
        tier.now += 1.0
    for i in order:
        record.note_used(i, tier)
        tier.now += 2.0
    return record


def test_only_the_first_use_of_an_activation_counts() -> None:
    tier = MadeUpTier(1.0, 1.0)
    record = diary_of(tier, [9, 8, 9, 8, 7])
    assert record.uses == [9, 8, 7]
    times = record.times(tier)
    assert [times[record.used[i]] for i in (9, 8, 7)] == [10.0, 12.0, 18.0]


def test_a_wait_is_taken_off_all_that_follows_it() -> None:
    tier = MadeUpTier(1.0, 1.0)
    record = StepRecord()
    record.note_saved(0, tier)
    tier.now = 1.0
    record.note_wait(1.0, 5.0)
    tier.now = 6.0
    record.note_used(0, tier)
    assert record.times(tier) == [0.0, 1.0, 1.0, 2.0]


def test_an_activation_held_in_the_first_run_stays_after_the_second() -> None:
    tier = MadeUpTier(100.0, 100.0)
    order = list(reversed(range(10)))
    first = profile_of_first(TEN, diary_of(tier, order, stays=[2]), 1.0)
    second = profile_of_repeat(first, diary_of(tier, order), 1.0, tier)
    assert [i for i, entry in enumerate(second.entries) if entry.stays] == [2]
    assert second.schedule.moved == {0, 1, 3, 4, 5, 6, 7}


def test_an_activation_that_is_not_used_has_no_time_of_use() -> None:
    tier = MadeUpTier(1.0, 1.0)
    record = diary_of(tier, [9, 8])
    entries = record.entries(TEN, record.times(tier))
    assert [entry.used_at for entry in entries] == [None] * 8 + [12.0, 10.0]
