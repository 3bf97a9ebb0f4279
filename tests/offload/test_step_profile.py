"""What learning makes of the record of a step."""

from collections.abc import Iterable, Sequence

from rekindle.offload.step_profile import StepRecord, profile_of_first, profile_of_repeat
from tests.offload.made_up_tier import TEN, MadeUpTier


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
