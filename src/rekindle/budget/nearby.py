"""What a little less memory would cost in time, and what a little more would save.

A tenth of what the activations have. Where all blocks are alike that is solved, in a fraction of a
second. Where they differ, solving takes seconds; there the plan itself is changed, block after
block, by the change that costs the least time for its bytes (or saves the most): that fits, and is
close to the best, not always the best.
"""

from collections.abc import Iterator
from dataclasses import replace

from rekindle.budget import solving
from rekindle.budget.simulate import simulate
from rekindle.budget.values import Nearby, Option, Prediction, Profile

_SHARE = 10


def nearby(
    profile: Profile, budget: int, options: tuple[Option, ...], now: Prediction
) -> tuple[Nearby | None, Nearby | None]:
    """A step with less memory and with more than one by these options, made for this budget."""
    used = min(budget, now.peak)  # of a budget with room to spare, less costs nothing
    part = max((used - profile.static_bytes) // _SHARE, 1)
    less = _within(profile, used - part, options)
    if less is not None and less.seconds is not None:
        less = replace(less, seconds=max(less.seconds, now.seconds))
    more = _within(profile, budget + part, options)
    if more is not None:  # what fits now fits then
        more = replace(more, seconds=min(more.seconds or now.seconds, now.seconds))
    return less, more


def _within(profile: Profile, limit: int, options: tuple[Option, ...]) -> Nearby | None:
    """A step within a limit; None if it is not known."""
    paths = {path for path, _ in profile.order}
    if len(profile.blocks) == 1 and len(paths) == len(profile.order):
        choice = solving.choose(profile, limit)
        return Nearby(limit, None if choice is None else choice.prediction.seconds)
    seconds = _changed(profile, options, limit)
    return None if seconds is None else Nearby(limit, seconds)


def _changed(profile: Profile, options: tuple[Option, ...], limit: int) -> float | None:
    """Seconds of a step within a limit, by changes to a plan; None if they do not lead there."""
    now = simulate(profile, options)
    while True:
        best: tuple[float, tuple[Option, ...], Prediction] | None = None
        for changed in _changes(profile, options):
            then = simulate(profile, changed)
            price = _price(now, then, limit)
            if price is not None and (best is None or price < best[0]):
                best = price, changed, then
        if best is None:
            return now.seconds if now.peak <= limit else None
        _, options, now = best


def _price(now: Prediction, then: Prediction, limit: int) -> float | None:
    """What a change costs in seconds a byte; None if it does not help."""
    slower, freed = then.seconds - now.seconds, now.peak - then.peak
    if now.peak > limit:
        return slower / min(freed, now.peak - limit) if freed > 0 else None
    return slower / max(-freed, 1) if slower < 0 and then.peak <= limit else None


def _changes(profile: Profile, options: tuple[Option, ...]) -> Iterator[tuple[Option, ...]]:
    """Another option for one block; of blocks that run alike, for the first or the last."""
    places: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(profile.order):
        places.setdefault(path, []).append(i)
    alike: dict[tuple[int, Option], list[list[int]]] = {}
    for where in places.values():
        alike.setdefault((profile.order[where[0]][1], options[where[0]]), []).append(where)
    for (kind, option), blocks in alike.items():
        ends = blocks[:1] if len(blocks) == 1 else (blocks[0], blocks[-1])
        for where in ends:
            for other in profile.blocks[kind].options:
                if other != option:
                    yield tuple(other if i in where else o for i, o in enumerate(options))
