"""The copy-outs in flight on one device: begun in order, and ended in that order."""

import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakMethod, ref

from torch import Tensor

from rekindle.errors import OffloadError
from rekindle.offload.residency import AWAY, ON_DEVICE
from rekindle.offload.tiers.base import Copy
from rekindle.offload.traffic_counter import TrafficCounter
from rekindle.sizes import format_bytes

if TYPE_CHECKING:
    from rekindle.offload.activation import Activation
    from rekindle.offload.step_activations import StepActivations
    from rekindle.offload.tiers.base import Tier
    from rekindle.strategy import Offload


class _CopyOut(NamedTuple):
    """One copy-out; the graph of its activation may have been thrown away meanwhile."""

    activation: "ref[Activation]"
    copy: Copy
    data: Tensor | None
    """The bytes that the device still reads, whoever else has let go of them."""
    nbytes: int


class CopyOutQueue:
    """Begins copy-outs to a tier, and releases the device's bytes in the same order.

    `CopyOutScheduler` decides what is added and when to wait.
    """

    def __init__(self, tier: "Tier", strategy: "Offload", traffic: TrafficCounter) -> None:
        self._tier = tier
        self._strategy = strategy
        self._traffic = traffic
        self._queue: deque[_CopyOut] = deque()
        self.nbytes = 0
        """Bytes in flight."""
        self._has_warned = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def begin(self, activation: "Activation") -> bool:
        """Begin to copy an activation out; False if it stays, for want of room."""
        data = activation.data
        if data is None or activation.residency is not ON_DEVICE:
            return False
        problem = "max_host_bytes, or what the machine has left, is reached"
        try:
            copy = self._tier.begin_copy_out(data, activation.saved_on)
        except OSError as error:
            problem, copy = str(error), None
        if copy is None:
            self._report_no_room(activation, problem)
            return False
        held = data if self._tier.waits_on_device else None
        copy_out = _CopyOut(ref(activation), copy, held, activation.nbytes)
        end = WeakMethod(activation.end_copy_out)
        number = activation.begin_copy_out(copy)
        self.nbytes += copy_out.nbytes
        self._queue.append(copy_out)
        copy.when_out(lambda: (method := end()) and method(number))
        return True

    def end_finished(self) -> None:
        """End the copy-outs at the head of the queue that are done, without waiting."""
        while self._queue and self._queue[0].copy.is_out():
            self._end_first(self._queue[0].copy.check_out)

    def end_first(self, step: "StepActivations | None") -> None:
        """End the oldest copy-out, after a wait for it that is counted for `step`."""

        def wait_out() -> None:
            with self._traffic.waiting(step):
                copy.wait_out()

        copy = self._queue[0].copy
        self._end_first(wait_out)

    def _end_first(self, see_out: Callable[[], None]) -> None:
        copy_out = self._queue[0]
        problem = None
        try:
            see_out()  # which may be interrupted, and is done again then
        except OSError as error:
            problem = str(error)
        self.nbytes -= copy_out.nbytes
        self._queue.popleft()
        activation = copy_out.activation()
        if activation is None or activation.copy is not copy_out.copy:
            return  # the activation is dead, or stayed after all
        if problem is not None:
            activation.keep_on_device()
            self._report_no_room(activation, problem)
        else:
            activation.end_copy_out(activation.copy_outs)
            if activation.residency is AWAY:
                activation.count(on_device=False)

    def _report_no_room(self, activation: "Activation", problem: str) -> None:
        """Raise or warn once, as `on_full` says: an activation stays for want of room."""
        where = "host memory" if self._strategy.tier == "host" else f"{self._strategy.directory!r}"
        message = (
            f"There is no room in {where} for an activation of {format_bytes(activation.nbytes)}: "
            f"{problem}."
        )
        if self._strategy.on_full == "raise":
            raise OffloadError(
                f"{message} Make room, offload less (quota=…), or keep what does not fit on the "
                'device with on_full="keep".'
            )
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rekindle.offload: {message} It stays on the device, and so will others.",
                stacklevel=3,
            )
