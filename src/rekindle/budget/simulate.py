"""The step's timeline: how high memory rises at each of its points, and how long it takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.budget.values import Option, Prediction, Profile


def simulate(profile: Profile, options: Sequence[Option]) -> Prediction:
    """What happens if each block runs by its option, in the order of the forward."""
    options = _stayed(options)
    base = profile.static_bytes + profile.before_bytes + _slack(options)
    blocks = [
        (path or "the model", option)
        for (path, _), option in zip(profile.order, options, strict=True)
    ]
    points = [(profile.first_peak - profile.before_bytes, "the forward before the blocks")]
    link = _Link(profile.bytes_per_second)
    held = 0
    between = profile.between or (0,) * len(blocks)
    for (path, option), made in zip(blocks, between, strict=True):
        held += made
        points.append((held + option.forward_peak + link.leaving, f"the forward of {path}"))
        held += option.bytes_held
        link.send(option.bytes_moved, option.forward_seconds)
    points.append((held + profile.rest_peak + link.leaving, "the head and the loss"))
    link.turn(profile.rest_seconds)
    fetched = _fetched(blocks)
    for (path, option), ahead, made in zip(
        reversed(blocks), fetched, reversed(between), strict=True
    ):
        points.append((held + option.backward_peak + ahead, f"the backward of {path}"))
        held -= option.bytes_held + made
        link.fetch(option.bytes_moved, option.backward_seconds)
    last = profile.last_peak - profile.before_bytes
    points.append((last, "the backward after the blocks"))
    highest, where = max(points)
    return Prediction(base + highest, profile.rest_seconds + link.seconds, where)


def _stayed(options: Sequence[Option]) -> list[Option]:
    """The options, with what the last that moves something would move held.

    The backward wants it first, so the offload engine keeps as much as two large results of it.
    """
    found = list(options)
    last = max((i for i, option in enumerate(found) if option.bytes_moved), default=None)
    if last is not None:
        option = found[last]
        moved = option.bytes_moved
        found[last] = replace(
            option,
            bytes_held=option.bytes_held + moved,
            bytes_moved=0,
            backward_peak=option.backward_peak - moved,
        )
    return found


def _slack(options: Sequence[Option]) -> int:
    """What may be there more than the timeline says: two results that leave late or come early."""
    moving = (option for option in options if option.bytes_moved)
    return 2 * max(
        (option.bytes_moved // max(len(option.offloaded), 1) for option in moving), default=0
    )


def _fetched(blocks: Sequence[tuple[str, Option]]) -> list[int]:
    """What is there ahead of its use in each backward: the next that comes back."""
    following = [option.bytes_moved for _, option in reversed(blocks)]
    found, coming = [], 0
    for moved in reversed(following):
        found.append(coming)
        coming = moved or coming
    return found[::-1]


@dataclass
class _Link:
    """Copies one thing after another, out in the forward and back in the backward."""

    rate: float
    seconds: float = 0.0
    """What the device has worked and waited so far."""
    free_at: float = 0.0
    """When all is copied that was given so far."""
    lead: float = 0.0
    """When the one that comes back next could begin: when the one before it was used."""
    leaving: int = 0
    """Bytes on their way out when something was last sent: until then it is let go, not after."""

    def send(self, nbytes: int, seconds: float) -> None:
        """A block's forward, with what it sends away: as it is made."""
        begin = max(self.free_at, self.seconds + seconds / 2)
        self.seconds += seconds
        if nbytes:
            self.free_at = max(begin + nbytes / self.rate, self.seconds)
            self.leaving = int((self.free_at - self.seconds) * self.rate)

    def turn(self, seconds: float) -> None:
        """The backward begins when all has left; half of what is outside the blocks is before."""
        self.seconds = max(self.seconds + seconds / 2, self.free_at) - seconds / 2
        self.free_at = self.lead = self.seconds

    def fetch(self, nbytes: int, seconds: float) -> None:
        """A block's backward, for which something has to come back: the next one ahead of it."""
        if nbytes:
            came = max(self.free_at, self.lead) + nbytes / self.rate
            self.free_at, self.lead = came, max(self.seconds, came)
            self.seconds = max(self.seconds, came)
        self.seconds += seconds
