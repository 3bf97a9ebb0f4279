"""Treatments: one candidate of one kind, and of one rank in it, for every block of a step."""

from collections.abc import Iterator

from rekindle.planner.candidates import kind_of_candidate
from rekindle.planner.types import Profile
from rekindle.strategy import Keep


def keeping(profile: Profile) -> list[int]:
    """The index at each place of the candidate that keeps all; of the first, if there is none."""
    return [
        next((k for k, each in enumerate(menu) if each.strategy == Keep()), 0)
        for menu in (profile.candidates(i) for i in range(len(profile.order)))
    ]


def treatments(profile: Profile) -> Iterator[list[int]]:
    """Yield the index of a candidate at each place: of one kind everywhere, and of one rank in it.

    A block that has no candidate of the kind keeps all.
    """
    ranked: list[dict[object, list[int]]] = []
    for block in profile.blocks:
        of_kind: dict[object, list[int]] = {}
        for k, candidate in enumerate(block.candidates):
            of_kind.setdefault(kind_of_candidate(candidate), []).append(k)
        ranked.append(of_kind)
    keep = keeping(profile)
    for kind in dict.fromkeys(kind for of_kind in ranked for kind in of_kind):
        for rank in range(max(len(of_kind.get(kind, ())) for of_kind in ranked)):
            indices = []
            for i, (_, index) in enumerate(profile.order):
                own = ranked[index].get(kind)
                indices.append(own[min(rank, len(own) - 1)] if own else keep[i])
            yield indices
