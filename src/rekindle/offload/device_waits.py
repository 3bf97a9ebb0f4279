"""How long the device waits for copies: measured for those who want to know."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rekindle import observation

if TYPE_CHECKING:
    from rekindle.offload.offload_options import Options
    from rekindle.offload.step_activations import Step
    from rekindle.offload.tiers.base import Tier


class Waits:
    """The waits for copies of one lane."""

    def __init__(self, tier: "Tier", options: "Options") -> None:
        self._tier = tier
        self._options = options

    @contextmanager
    def measured(self, step: "Step | None") -> Iterator[None]:
        """Entered around a wait; measures it, if the step or an observer wants to know."""
        is_measured = step is not None and step.is_measured
        if not (is_measured or observation.active):
            yield
            return
        begin = self._tier.mark()
        yield
        end = self._tier.mark()
        if step is not None and step.is_measured:
            step.diary.note_wait(begin, end)
        for seen in observation.active:
            seen.traffic(self._options.tier).add_wait(self._tier.seconds, begin, end)
