"""Copies activations back: ahead of their use by schedule, or when backward asks."""

from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor

from rekindle.errors import OffloadError
from rekindle.offload.activation import Activation
from rekindle.offload.residency import AWAY, RETURNING
from rekindle.offload.step_activations import StepActivations
from rekindle.offload.traffic_counter import TrafficCounter
from rekindle.sizes import format_bytes

if TYPE_CHECKING:
    from rekindle.offload.tiers.base import Tier
    from rekindle.strategy import Offload


class Prefetcher:
    """Copies the activations of one device back from its tier."""

    def __init__(self, tier: "Tier", strategy: "Offload", traffic: TrafficCounter) -> None:
        self._tier = tier
        self._directory = strategy.directory
        self._traffic = traffic

    def prefetch(self, step: StepActivations) -> None:
        """Begin to copy back what backward uses next, as much as the schedule allows at a time."""
        assert step.schedule is not None, "it is made when backward begins, at the latest"
        if step.returning:
            self._continue_returns(step)
        while step.to_prefetch:
            due = step.activations[step.to_prefetch[0]]()
            if due is not None and not due.keep_on_device() and due.needs_return():
                if step.device_bytes + due.nbytes > step.schedule.ceiling:
                    return
                if not self._begin_return(due):
                    return
            step.to_prefetch.popleft()

    def _continue_returns(self, step: StepActivations) -> None:
        """Have copies back that go in stages begin their next stage."""
        alive = [activation for weak in step.returning if (activation := weak()) is not None]
        returning = [activation for activation in alive if activation.residency is RETURNING]
        step.returning = [ref(activation) for activation in returning]
        for activation in returning:
            self._begin_return(activation)

    def bring_back(self, step: StepActivations, activation: Activation) -> Tensor:
        """Returns the bytes of an activation that is away, and prefetches what follows it."""
        is_prefetched = activation.residency is RETURNING
        self._traffic.add(**{"prefetch_hits" if is_prefetched else "prefetch_misses": 1})
        if not is_prefetched:
            self._begin_return(activation)
        self.prefetch(step)
        assert activation.copy is not None, "what is away has a copy"
        self._note_returning(activation)
        try:
            with self._traffic.waiting(step):
                return activation.copy.finish_return()
        except OSError as error:
            raise OffloadError(
                f"An activation of {format_bytes(activation.nbytes)} could not be read back from "
                f"{self._directory!r}: {error}. Without it this backward cannot be done; "
                "run the step again, on a disk that can be read."
            ) from error

    def _begin_return(self, activation: Activation) -> bool:
        """Begin or continue one copy back; False if the tier cannot do that now."""
        assert activation.copy is not None, "what is away has a copy"
        try:
            if not activation.copy.begin_return():
                return False
        except OSError:  # is raised again when the bytes are taken
            return False
        self._note_returning(activation)
        return True

    def _note_returning(self, activation: Activation) -> None:
        if activation.residency is AWAY:
            activation.begin_return()
            activation.count(on_device=True)
            self._traffic.add(tensors_in=1, bytes_in=activation.nbytes)
            if self._tier.returns_in_stages:
                activation.step.returning.append(ref(activation))
