"""Several steps in turn, of several shapes, are each learnt."""

from tests.offload.made_up_tier import TEN, Make, Report, Trainer


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
