"""Times that cannot be are measured again, and then taken to be the least that can.

Every option of a block runs all that the plain block runs, and more. One that was measured to be
faster met a quick moment, or the plain block a slow one. Then all of the block's options are timed
again, in turns, so that a slow moment meets all of them; what is impossible still is raised to the
plain block's time. So no plan is predicted to be faster than no plan.
"""

from collections.abc import Callable
from dataclasses import replace

from rekindle.planner.ranks.rank_sync import all_gather
from rekindle.planner.types import Option

TimeAgain = Callable[[list[Option]], list[Option]]
"""Times options once more, in turns: the same options with the least that was seen."""


def plausible(options: list[Option], time_again: TimeAgain) -> list[Option]:
    """A block's options, of which the first keeps all, with times that can be.

    All ranks time theirs again if one has to. A rank that has not run the block has no options.
    """
    is_odd = any(_is_too_fast(option, options[0]) for option in options)
    if any(all_gather(is_odd)) and options:
        options = time_again(options)
    return [at_least(option, options[0]) for option in options]


def _is_too_fast(option: Option, keep: Option) -> bool:
    """Whether an option takes less than the plain block, by more than both were uncertain."""
    noise = option.seconds_noise + keep.seconds_noise
    device = keep.forward_seconds + keep.backward_seconds
    host = keep.forward_host + keep.backward_host
    return (
        option.forward_seconds + option.backward_seconds < device - noise
        or option.forward_host + option.backward_host < host - noise
    )


def at_least(option: Option, keep: Option) -> Option:
    """An option with the plain block's times where its own are less."""
    return replace(
        option,
        forward_seconds=max(option.forward_seconds, keep.forward_seconds),
        backward_seconds=max(option.backward_seconds, keep.backward_seconds),
        forward_host=max(option.forward_host, keep.forward_host),
        backward_host=max(option.backward_host, keep.backward_host),
    )
