"""Counts of one device's copies and waits: for `rekindle.observe` and for measured steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rekindle import observation

if TYPE_CHECKING:
    from rekindle.offload.step_activations import StepActivations
    from rekindle.offload.tiers.base import Tier
    from rekindle.strategy import TierName


class TrafficCounter:
    """Counts what one device offloader moves, and how long the device waits for copies."""

    def __init__(self, tier: "Tier", name: "TierName") -> None:
        self._tier = tier
        self._name = name

    def add(self, **counts: int) -> None:
        """Add to the counts of those who observe."""
        for seen in observation.active:
            seen.traffic(self._name).add(self._tier.pool_bytes, **counts)

    @contextmanager
    def waiting(self, step: "StepActivations | None") -> Iterator[None]:
        """Entered around a wait for a copy: measures it, if the step or an observer needs it."""
        is_measured = step is not None and step.is_measured
        if not (is_measured or observation.active):
            yield
            return
        begin = self._tier.mark()
        yield
        end = self._tier.mark()
        if step is not None and step.is_measured:
            step.record.note_wait(begin, end)
        for seen in observation.active:
            seen.traffic(self._name).add_wait(self._tier.seconds, begin, end)
