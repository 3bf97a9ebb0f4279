"""The activations that are on their way out: sent in order, and let go in that order."""

import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakMethod, ref

from torch import Tensor

from rekindle.errors import OffloadError
from rekindle.offload.device_waits import Waits
from rekindle.offload.tiers.base import Copy
from rekindle.sizes import format_bytes

if TYPE_CHECKING:
    from rekindle.offload.activation import Activation
    from rekindle.offload.offload_options import Options
    from rekindle.offload.step_activations import Step
    from rekindle.offload.tiers.base import Tier


class _Departure(NamedTuple):
    """One activation that is leaving; its graph may have been thrown away meanwhile."""

    activation: "ref[Activation]"
    copy: Copy
    data: Tensor | None
    """What the device still reads, whoever else has let go of it."""
    nbytes: int


class Departures:
    """Sends activations to a tier, and lets go of them when they are there."""

    def __init__(
        self,
        tier: "Tier",
        options: "Options",
        waits: Waits,
    ) -> None:
        self._tier = tier
        self._options = options
        self._waits = waits
        self._queue: deque[_Departure] = deque()
        self.nbytes = 0
        """What is on its way."""
        self._has_warned = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def send(self, activation: "Activation") -> bool:
        """Begin to copy an activation out; False if it stays."""
        data = activation.here
        if data is None or activation.copy is not None:
            return False
        problem = "max_host_bytes, or what the machine has left, is reached"
        try:
            copy = self._tier.send(data, activation.saved_on)
        except OSError as error:
            problem, copy = str(error), None
        if copy is None:
            self._no_room(activation, problem)
            return False
        kept = data if self._tier.waits_on_device else None
        departure = _Departure(ref(activation), copy, kept, activation.nbytes)
        let_go = WeakMethod(activation.let_go)
        send = activation.send_by(copy)
        self.nbytes += departure.nbytes
        self._queue.append(departure)
        copy.when_out(lambda: (method := let_go()) and method(send))
        return True

    def release_finished(self) -> None:
        """Let go of those that are out, in order."""
        while self._queue and self._queue[0].copy.is_out():
            self._release(self._queue[0].copy.check_out)

    def release_first(self, step: "Step | None") -> None:
        """Let go of the one that began to leave first, after waiting for it."""

        def wait_out() -> None:
            with self._waits.measured(step):
                copy.wait_out()

        copy = self._queue[0].copy
        self._release(wait_out)

    def _release(self, see_out: Callable[[], None]) -> None:
        departure = self._queue[0]
        problem = None
        try:
            see_out()  # which may be interrupted, and is done again then
        except OSError as error:
            problem = str(error)
        self.nbytes -= departure.nbytes
        self._queue.popleft()
        activation = departure.activation()
        if activation is None or activation.copy is not departure.copy:
            return  # nobody wants it any more, or it stayed after all
        if problem is not None:
            activation.stay()
            self._no_room(activation, problem)
        else:
            activation.let_go(activation.sends)
            if activation.here is None and not activation.is_coming:
                activation.count(here=False)

    def _no_room(self, activation: "Activation", problem: str) -> None:
        where = "host memory" if self._options.tier == "host" else f"{self._options.directory!r}"
        message = (
            f"There is no room in {where} for an activation of {format_bytes(activation.nbytes)}: "
            f"{problem}."
        )
        if self._options.on_full == "raise":
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
