"""Ctrl-C at any moment of a step: everything is as before, and the next step's gradients are right.

`python -m tests.interrupts` does the same with thousands of moments.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interrupts.steps import WAYS
from tests.interrupts.trial import Trial
from tests.spilling import outcome

_MOMENTS = 12
"""Of how many moments of each step, spread over it, an interrupt is tried."""


@pytest.fixture(autouse=True)
def unfrozen_at_the_end() -> Iterator[None]:
    """A trial hides what there is from the garbage collector, which so takes no time."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("way", WAYS)
def test_after_an_interrupt_at_any_moment_all_is_as_before_and_the_next_step_is_right(
    way: str,
) -> None:
    trial = Trial(way)
    for retain in (False, True):
        count = trial.moments(retain)
        for number in range(_MOMENTS // 2):
            at = (2 * number + 1) * count // _MOMENTS
            assert trial.interrupted(at, retain) == []


@pytest.mark.parametrize("way", ["recompute", "policy", "disk"])
def test_after_a_signal_all_is_as_before_and_the_next_step_is_right(way: str) -> None:
    trial = Trial(way)
    lasts = trial.seconds()
    for number in range(8):
        assert trial.signalled(lasts * number / 8, retain=bool(number % 2)) == []


def test_a_process_that_was_interrupted_while_it_spilled_ends(tmp_path: Path) -> None:
    text = """
        import sys
        from tests.interrupts.moments import Moments
        from tests.interrupts.trial import Trial

        def tell(args):  # Python tells of an interrupt in a finalizer, and drops it
            if args.exc_type is not KeyboardInterrupt:
                sys.__unraisablehook__(args)

        sys.unraisablehook = tell
        trial = Trial("disk")
        count = trial.moments(retain=False)
        for number in range(5):
            trial.trainer.prepare()
            Moments(number * count // 6).run(lambda: trial.trainer.run(retain=False))
        print("at its end")
    """
    assert outcome(text, tmp_path) == (0, "at its end", "")
