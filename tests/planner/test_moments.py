"""The moments of a timeline as sums: what the integer program has for rows is what is simulated."""

import random
from dataclasses import replace

import pytest

pytest.importorskip("scipy")

from rekindle.planner.timeline import Moment, Timeline
from rekindle.planner.types import Candidate, Profile
from tests.planner.random_profiles import random_profile

every_seed = pytest.mark.parametrize("seed", range(12))


def bytes_at(timeline: Timeline, moment: Moment, indices: list[int]) -> int:
    """Memory at a moment, added up."""
    terms = [timeline.terms[i][k] for i, k in enumerate(indices)]
    waiting = [] if moment.waiting_from is None else terms[moment.waiting_from :]
    found = moment.constant + sum(each.left for each in terms[: moment.left_until])
    found += sum(terms[i].cached for i in moment.cached) + sum(each.waiting for each in waiting)
    if moment.place is not None and moment.peak is not None:
        found += getattr(terms[moment.place], moment.peak)
    return found


def profile_with_everything(draw: random.Random) -> Profile:
    """Blocks between others, called once or twice, that free their input and cast weights."""
    profile = random_profile(draw.randrange(99), blocks=7, link=False)
    count = len(profile.order)

    def changed(candidate: Candidate) -> Candidate:
        return replace(
            candidate,
            input_freed=draw.randrange(10**7),
            casts_cached=draw.randrange(10**7),
            casts_held=draw.randrange(10**6),
        )

    blocks = tuple(
        replace(block, candidates=tuple(map(changed, block.candidates))) for block in profile.blocks
    )
    paths = {i: f"blocks.{draw.randrange(count)}" for i in range(count) if draw.random() < 0.4}
    order = tuple((paths.get(i, path), 0) for i, (path, _) in enumerate(profile.order))
    return replace(
        profile,
        blocks=blocks,
        order=order,
        between=tuple(draw.randrange(10**6) for _ in order),
        passed=tuple(draw.randrange(10**7) for _ in order),
        cast_epochs=tuple(sorted(draw.randrange(3) for _ in order)),
        cached_rest_peak=draw.randrange(10**8),
        casts_in_backward=draw.random() < 0.5,
        output_held=draw.randrange(10**7),
    )


@every_seed
def test_where_nothing_moves_the_peak_is_the_largest_sum(seed: int) -> None:
    draw = random.Random(seed)
    profile = profile_with_everything(draw)
    timeline = Timeline(profile)
    for _ in range(20):
        by_path: dict[str, int] = {}
        indices = [
            by_path.setdefault(path, draw.randrange(len(profile.candidates(i))))
            for i, (path, _) in enumerate(profile.order)
        ]
        sums = [bytes_at(timeline, moment, indices) for moment in timeline.moments]
        found = timeline.predict(indices)
        assert found.peak == timeline.base + max(sums)
        assert found.at == timeline.moments[sums.index(max(sums))].at


@every_seed
def test_indices_predict_what_their_candidates_do(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(seed, blocks=6)
    timeline = Timeline(profile)
    indices = [draw.randrange(len(profile.candidates(i))) for i in range(6)]
    candidates = [profile.candidates(i)[k] for i, k in enumerate(indices)]
    assert timeline.predict(indices) == timeline.predict_candidates(candidates)
