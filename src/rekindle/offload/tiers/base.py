"""What the engine asks of a place that activations go to.

A tier copies bytes away from one device and back. It works in the background: `send` and `fetch`
only begin; `Copy.wait_out` and `Copy.take` make the device wait where it has streams, and the
caller where it has none. Times are read through marks, in the device's own order of work.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

Mark = Any
"""A moment in the device's order of work."""
Place = Any
"""A stream of the device, or None where there is but one."""


class Copy(ABC):
    """Some bytes that are on their way out, away, on their way in, or back."""

    __slots__ = ()

    @abstractmethod
    def is_out(self) -> bool:
        """Whether what was sent may be let go without waiting."""

    def when_out(self, let_go: Callable[[], None]) -> None:  # noqa: B027
        """Call `let_go` once it is out, from a thread of the tier's, if it has any."""

    def check_out(self) -> None:  # noqa: B027
        """Raises `OSError` if it is done, but never got out."""

    @abstractmethod
    def wait_out(self) -> None:
        """After this, what was sent may be let go. Raises `OSError` if it never got out."""

    @abstractmethod
    def fetch(self) -> bool:
        """Begin to copy the bytes in, or go on with it; False if that is not possible now."""

    @abstractmethod
    def take(self) -> Tensor:
        """The bytes, asked for by `fetch` if that could be, for work from now on to use."""

    @abstractmethod
    def drop(self) -> None:
        """Let go of the bytes that `fetch` asked for; they stay away."""

    @abstractmethod
    def close(self) -> None:
        """Give the room back. Never waits, never raises; callable from anywhere."""


class Tier(ABC):
    """Where the activations of one device go."""

    waits_on_device: bool
    """Whether a wait makes the device wait, and the caller goes on."""

    fetches_in_stages = False
    """Whether a fetch that has begun is to be asked for again, to go on."""

    @abstractmethod
    def send(self, data: Tensor, saved_on: Place) -> Copy | None:
        """Begin to copy bytes out; None if there is no room. Raises `OSError` if it is broken."""

    def place(self) -> Place:
        """Where the device works now: what is done there next comes after what was done before."""
        return None

    def join(self, data: Tensor, made_at: Place) -> None:  # noqa: B027
        """Have work at this place come after what was done at another, and let it use `data`."""

    @property
    @abstractmethod
    def pool_bytes(self) -> int:
        """What the tier has set aside for copies, in use or not."""

    @abstractmethod
    def trim(self) -> None:
        """Give back what the tier set aside and does not use."""

    def watch_use(self) -> None:  # noqa: B027
        """See from now on what is used of what was set aside."""

    def shrink(self) -> None:  # noqa: B027
        """Give back what was not used since `watch_use`."""

    def growth(self) -> int:
        """A number that changes when anything had to be set aside, which takes a while."""
        return self.pool_bytes

    def time_copies(self, enable: bool) -> None:  # noqa: B027
        """Time copies from now on, or no more, if it costs anything."""

    @abstractmethod
    def mark(self) -> Mark:
        """The device's present moment."""

    @abstractmethod
    def seconds(self, begin: Mark, end: Mark) -> float:
        """The time between two marks; waits until both have come."""

    @abstractmethod
    def rates(self) -> tuple[float, float]:
        """Bytes per second out and in, as measured so far; zero where nothing was."""
