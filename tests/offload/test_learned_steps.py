"""A device offloader learns a step in two runs, and from then on keeps to its schedule."""

from itertools import chain, repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.offload.step_profile import StepRecord
from tests.offload.made_up_tier import LITTLE, TEN, Trainer


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
