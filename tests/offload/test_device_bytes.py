"""Bytes on the device in a learnt step: its ceiling, its peak, and what somebody else holds."""

import pytest

from rekindle.offload.schedule import ActivationTimes
from rekindle.offload.step_profile import make_profile
from tests.offload.made_up_tier import TEN, MadeUpTier, Trainer


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


def test_bytes_counted_on_the_device_are_those_that_are_there() -> None:
    trainer = Trainer(quota=0.5, out=4.0, back=2.0)
    counted = []

    class Looking(MadeUpTier):
        def look(self) -> int:
            here = super().look()
            step = trainer.offloader._step
            if step is not None and not trainer.offloader.dead:
                counted.append((step.device_bytes, here))
            return here

    trainer.tier.__class__ = Looking
    trainer.steps(4, [8, 4, 16, 8, 40, 4, 8, 8, 16, 12])
    assert counted
    assert [pair for pair in counted if pair[0] != pair[1]] == []


def test_nothing_is_here_or_away_when_all_is_over() -> None:
    trainer = Trainer(quota=1.0)
    trainer.steps(3, TEN)
    trainer.offloader._process_finished()
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
