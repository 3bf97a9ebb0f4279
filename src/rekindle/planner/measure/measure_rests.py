"""The ways to run what is outside the blocks, as a profile has them, from the steps that ran them.

While a profile is made, it is that of the step that was traced first, whose heads may go by rows.
In the end its own figures are those of a step without a plan, and the others are beside them.
"""

from collections.abc import Sequence

from rekindle.planner.candidates import recomputing_all
from rekindle.planner.measure.step_calibration import with_step_time
from rekindle.planner.rest import Rest
from rekindle.planner.timeline import cached_after_blocks
from rekindle.planner.types import Profile, StepTrace


def with_rests(profile: Profile, first: StepTrace, others: Sequence[StepTrace]) -> Profile:
    """Return the profile with the memory and the whole time of steps that run heads in each way.

    Times outside the blocks are left to `with_times_of_rests`.
    """
    traces = (*others[:1], first, *others[1:])  # without strategies for heads, by rows, in tiles
    return profile.with_rests(*(_rest_of(trace, profile) for trace in traces))


def _rest_of(trace: StepTrace, profile: Profile) -> Rest:
    # What a later step reads, as from a closure, was there before its first block.
    peak = trace.rest_peak + max(trace.before_bytes - profile.before_bytes, 0)
    if trace.casts_freed_before_backward:  # the trace's rest_peak is above the casts' bytes
        peak += cached_after_blocks(profile, recomputing_all(profile))
    spans = trace.spans
    return Rest(
        heads=trace.heads,
        rest_peak=peak,
        rest_seconds=0.0,
        cached_rest_peak=max(trace.cached_rest_peak, 0),
        rest_host_seconds=profile.rest_host_seconds if spans is None else spans.host_outside,
        output_held=trace.output_held,
        recompute_peak=profile.static_bytes + trace.peak if trace.is_measured else None,
        recompute_seconds=trace.seconds,
    )


def with_times_of_rests(profile: Profile) -> Profile:
    """Return the profile with the seconds outside the blocks: what steps took beyond their blocks.

    Each way takes less memory than those before it; one that does not is left out.
    """
    found: list[Rest] = []
    for rest in (profile.rest, *profile.rests):
        if not found or rest.rest_peak < found[-1].rest_peak:
            found.append(_timed(profile, rest))
    return profile.with_rests(*found)


def _timed(profile: Profile, rest: Rest) -> Rest:
    assert rest.recompute_seconds is not None, "the step was timed"
    return with_step_time(profile.with_rests(rest), rest.recompute_seconds).rest
