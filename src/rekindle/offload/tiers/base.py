"""The contract of a tier: a place that activations of one device are copied to.

A tier copies bytes away from one device and back, in the background: `Tier.begin_copy_out` and
`Copy.begin_return` begin; `Copy.wait_out` and `Copy.finish_return` make the device wait where it
has streams, and the caller where it has none. Times are read through marks, in the device's own
order of work.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

Mark = Any
"""A moment in the device's order of work."""
Stream = Any
"""A stream of the device, or None where there is but one."""


class Copy(ABC):
    """The bytes of one activation in a tier: being copied out, away, or being copied back."""

    __slots__ = ()

    @abstractmethod
    def is_out(self) -> bool:
        """True if the copy-out is done: the device's bytes may be released without a wait."""

    def when_out(self, let_go: Callable[[], None]) -> None:  # noqa: B027
        """Call `let_go` when the copy-out is done, from a thread of the tier's, if it has any."""

    def check_out(self) -> None:  # noqa: B027
        """Raises `OSError` if the copy-out has ended and failed."""

    @abstractmethod
    def wait_out(self) -> None:
        """Wait for the copy-out: the device's bytes may be released. `OSError` if it failed."""

    @abstractmethod
    def begin_return(self) -> bool:
        """Begin to copy the bytes back, or continue with it; False if that is not possible now."""

    @abstractmethod
    def finish_return(self) -> Tensor:
        """Returns the bytes on the device, for work from now on to use."""

    @abstractmethod
    def drop(self) -> None:
        """Release the device's bytes of a copy back that was not finished; the copy stays."""

    @abstractmethod
    def close(self) -> None:
        """Free the copy. Never waits, never raises; callable from anywhere."""


class Tier(ABC):
    """A place that the activations of one device are copied to."""

    waits_on_device: bool
    """True if a wait makes the device wait, and the caller goes on."""

    returns_in_stages = False
    """True if `begin_return` has to be called again for a copy back to continue."""

    @abstractmethod
    def begin_copy_out(self, data: Tensor, saved_on: Stream) -> Copy | None:
        """Begin a copy-out; None if there is no room. Raises `OSError` if the tier is broken."""

    def current_stream(self) -> Stream:
        """Returns the stream on which the device works now; work on one stream is in order."""
        return None

    def join(self, data: Tensor, made_at: Stream) -> None:  # noqa: B027
        """Have work on the current stream wait for that on another, and let it use `data`."""

    @property
    @abstractmethod
    def pool_bytes(self) -> int:
        """Bytes that the tier has set aside for copies, in use or not."""

    @abstractmethod
    def trim(self) -> None:
        """Give back the bytes that the tier set aside and does not use."""

    def watch_use(self) -> None:  # noqa: B027
        """Record from now on which of the bytes set aside are used."""

    def shrink(self) -> None:  # noqa: B027
        """Give back the bytes that were not used since `watch_use`."""

    def growth(self) -> int:
        """Returns a number that changes when memory had to be set aside, which takes a while."""
        return self.pool_bytes

    def time_copies(self, enable: bool) -> None:  # noqa: B027
        """Time copies from now on, or no more, if it costs anything."""

    @abstractmethod
    def mark(self) -> Mark:
        """Returns a mark of the device's present moment."""

    @abstractmethod
    def seconds(self, begin: Mark, end: Mark) -> float:
        """Returns the time between two marks; waits until both have come."""

    @abstractmethod
    def rates(self) -> tuple[float, float]:
        """Returns the bytes per second out and back, as measured so far; zero where nothing was."""
