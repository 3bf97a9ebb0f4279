"""The scheduler of copy-outs: when each begins, and when the device waits for them.

Every copy-out begins in `CopyOutScheduler._begin`, and one of these leads there:

- `schedule`, right after an activation was saved. A known step repeats one that was learnt; it has
  a schedule, and the copy-outs of what that moves begin at once. In an unknown step a copy-out
  begins when enough was saved after it, within the quota.
- `schedule_owner_unknown`, for a tensor that no op of autograd made: at the next save, at the end
  of a `with` block, or when backward begins. Note [Whose tensor is it].

Memory is released in the order of the device's stream: `limit_device_bytes` has the device wait for
the oldest copies whenever more would be on it than the schedule allows. So the peak does not depend
on how far Python runs ahead of the device.
"""

from threading import get_ident
from typing import TYPE_CHECKING
from weakref import ref

from rekindle.offload.activation import Activation
from rekindle.offload.copy_out_queue import CopyOutQueue
from rekindle.offload.learned_steps import LearnedSteps
from rekindle.offload.step_activations import OpPosition, StepActivations
from rekindle.offload.traffic_counter import TrafficCounter

if TYPE_CHECKING:
    from rekindle.offload.tiers.base import Tier
    from rekindle.strategy import Offload


class CopyOutScheduler:
    """Decides which activations of one device are copied out, and when."""

    def __init__(
        self, tier: "Tier", strategy: "Offload", learned: LearnedSteps, traffic: TrafficCounter
    ) -> None:
        self._tier = tier
        self._learned = learned
        self._traffic = traffic
        self.queue = CopyOutQueue(tier, strategy, traffic)

    def schedule(self, step: StepActivations, activation: Activation, op: OpPosition) -> None:
        """Begin the copy-out of what was just saved if it is due; then limit the device's bytes."""
        step.match_known(self._learned.known)
        if step.is_measured:
            step.record.note_saved(activation.index, self._tier)
        if step.schedule is None:
            if activation.owner_unknown:
                step.owner_unknown.append((ref(activation), op))
            else:
                for ready in step.add_recent(activation):
                    self._begin_within_quota(step, ready)
        elif activation.index in step.schedule.moved and step.is_complete(activation):
            if activation.owner_unknown:
                step.owner_unknown.append((ref(activation), op))
            else:
                self._begin(activation)
        self.limit_device_bytes(step)

    def schedule_owner_unknown(
        self, step: StepActivations, running: OpPosition | None = None
    ) -> None:
        """Begin copy-outs that waited for their owner.

        In a known step all of them, in an unknown one those held by us alone. Those that the op
        `running` saved wait: it may still write to them. Without `running` this is the last call
        of this forward.
        """
        later = []
        for weak, op in step.owner_unknown:
            activation = weak()
            if activation is None:
                continue
            if op == running or op[0] != get_ident():
                later.append((weak, op))
            elif step.schedule is not None:
                self._begin(activation)
            elif activation.is_held_by_us_alone():
                ready = [activation] if running is None else step.add_recent(activation)
                for leaving in ready:
                    self._begin_within_quota(step, leaving)
            elif running is None:
                step.record.stays.add(activation.index)
            else:
                later.append((weak, op))
        step.owner_unknown = later

    def _begin_within_quota(self, step: StepActivations, activation: Activation) -> None:
        """In an unknown step: begin a copy-out if the quota allows it.

        The quota is a share (`float`) of the bytes that were offered so far, or bytes (`int`).
        """
        quota = self._learned.usual_quota
        step.offered_bytes += activation.nbytes
        limit = round(quota * step.offered_bytes) if isinstance(quota, float) else quota
        if step.copied_bytes + activation.nbytes <= limit:
            self._begin(activation)

    def _begin(self, activation: Activation) -> None:
        if self.queue.begin(activation):
            activation.step.copied_bytes += activation.nbytes
            self._traffic.add(tensors_out=1, bytes_out=activation.nbytes)

    def limit_device_bytes(self, step: StepActivations) -> None:
        """Have the device wait for copy-outs until no more is on it than the schedule allows."""
        queue = self.queue
        if not queue:
            return
        if step.schedule is None:
            while queue and queue.nbytes > step.lead:
                queue.end_first(step)
        else:
            ceiling = step.schedule.ceiling_after(len(step.sizes) - 1)
            while queue and step.device_bytes > ceiling:
                queue.end_first(step)

    def end_all(self, step: StepActivations | None) -> None:
        """Have the device wait for all copy-outs; the waits are counted for `step`."""
        while self.queue:
            self.queue.end_first(step)
