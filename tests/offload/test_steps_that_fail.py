"""Steps that do not end, tiers without room, and copies that overtake each other."""

import pytest
import torch

from tests.offload.made_up_tier import TEN, Make, Trainer


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


def test_a_graph_that_is_thrown_away_is_not_learnt_from() -> None:
    trainer = Trainer(quota=1.0)
    trainer.step(TEN, goes_backward=False)
    assert trainer.known == []


def test_a_graph_that_is_thrown_away_leaves_nothing_behind() -> None:
    trainer = Trainer(quota=1.0)
    trainer.step(TEN, goes_backward=False)
    trainer.offloader._process_finished()
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
    trainer.offloader._process_finished()
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


def test_what_is_let_go_behind_a_slower_copy_is_counted_right() -> None:
    trainer = Trainer(quota=1.0, out=1.0, back=100.0, on_device=False)
    trainer.steps(3, TEN)
    trainer.tier.work(1000.0)
    trainer.offloader._process_finished()
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
    trainer.offloader._process_finished()
    assert step.device_bytes == trainer.tier.look()
    del out
    trainer.offloader._process_finished()
    assert step.device_bytes == trainer.tier.look() == 0


def test_what_is_still_leaving_when_it_is_asked_back_is_there_at_its_use() -> None:
    # Asked back while still here, it is let go a moment later, and missing when it is used.
    trainer = Trainer(quota=1.0, out=2.0, back=100.0, on_device=False)
    assert [report.misses for report in trainer.steps(4, TEN)] == [0, 0, 0, 0]


def test_a_caller_who_waits_gets_every_activation_back() -> None:
    report = Trainer(quota=1.0, out=0.5, back=0.5, on_device=False).steps(4, TEN)[-1]
    assert report.used == list(reversed(range(10)))
