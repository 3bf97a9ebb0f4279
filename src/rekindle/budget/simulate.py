"""The step's timeline: how high memory rises at each of its points, and how long it takes."""

from collections.abc import Sequence

from rekindle.budget.values import Option, Prediction, Profile


def simulate(profile: Profile, options: Sequence[Option]) -> Prediction:
    """What happens if each block runs by its option, in the order of the forward."""
    base = profile.static_bytes + profile.before_bytes
    flying = 2 * max((option.bytes_moved for option in options), default=0)
    held = 0
    points: list[tuple[int, str]] = [(base, "the start")]
    for (path, _), option in zip(profile.order, options, strict=True):
        points.append((held + option.forward_peak, f"the forward of {path}"))
        held += option.bytes_held
    points.append((held + profile.rest_peak, "the head and the loss"))
    for (path, _), option in zip(reversed(profile.order), reversed(options), strict=True):
        points.append((held + option.backward_peak, f"the backward of {path}"))
        held -= option.bytes_held
    highest, where = max(points[1:], default=(0, "the start"))
    seconds = profile.rest_seconds + sum(option.seconds for option in options)
    return Prediction(base + highest + flying, seconds + link_seconds(profile, options), where)


def link_seconds(profile: Profile, options: Sequence[Option]) -> float:
    """How long the device waits for copies: out during the forward, in during the backward."""
    moved = sum(option.bytes_moved for option in options)
    if not moved:
        return 0.0
    taken = moved / profile.bytes_per_second
    forward = sum(option.forward_seconds for option in options)
    backward = sum(option.backward_seconds for option in options)
    return max(0.0, taken - forward) + max(0.0, taken - backward)
