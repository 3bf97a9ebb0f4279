"""Changes to what is done with the activations of blocks, predicted by the planner's timeline."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from rekindle.explanation.types import Change
from rekindle.modules.patterns import generalized
from rekindle.planner.plan_for_budget import (
    BudgetError,
    plain_candidates,
    plain_prediction,
    solved,
)
from rekindle.planner.timeline import Timeline, simulate
from rekindle.planner.treatments import treatments
from rekindle.planner.types import Candidate, Prediction, Profile
from rekindle.sizes import format_budget, format_bytes
from rekindle.strategy import Keep, Recompute

_USUAL = 0.1
"""Share of a step's time that a change of candidates may add, where no memory is to be met."""
_LISTED = 4
"""Modules that are listed in code by their paths."""


def changes_of_blocks(profile: Profile, device_bytes: int | None) -> Iterator[Change]:
    """Yield changes to what is done with the activations of the blocks."""
    plain = plain_prediction(profile)
    choices = _Choices(profile, plain, device_bytes)
    yield choices.recompute_all()
    if len(dict.fromkeys(path for path, _ in profile.order)) > 1:
        yield choices.recompute_some()
    yield from choices.by_kind("keep the costly results of each block", moves=False)
    if profile.bytes_per_second:
        yield from choices.by_kind("offload from every block", moves=True)
    else:
        none = "the device has no link over which activations could leave"
        yield Change("offload", "", plain.peak, 0, plain.seconds, plain.at, none)
    if find_spec("scipy") is not None:
        yield from choices.plan()


class _Choices:
    """Choices of candidates for the blocks of a step."""

    def __init__(self, profile: Profile, plain: Prediction, limit: int | None) -> None:
        self._profile = profile
        self._plain = plain
        self._timeline = Timeline(profile)
        self._limit = limit if limit is not None and limit < plain.peak else None
        """Bytes that the step has to fit into; None if it fits, or they are not known."""

    def recompute_all(self) -> Change:
        """Recompute every block."""
        paths = dict.fromkeys(generalized(path) for path, _ in self._profile.order)
        strategies = ", ".join(f'"{path}": "recompute"' for path in paths)
        found = self._recomputing(len(self._profile.order))
        how = f"rekindle.apply(model, {{{strategies}}})"
        return self._change("recompute every block", how, found)

    def recompute_some(self) -> Change:
        """Recompute the first blocks: as few as fit, or else half of them."""
        paths = list(dict.fromkeys(path for path, _ in self._profile.order))
        count = len(paths) // 2
        if self._limit is not None:
            fitting = (k for k in range(1, len(paths)) if self._fits(self._recomputing(k)))
            count = next(fitting, count)
        candidates = self._recomputing(count)
        strategies = _recomputing_first(paths[:count])
        how = f"rekindle.apply(model, {strategies})"
        if not strategies:
            how = self._fit_to(self._predict(candidates).peak)
        return self._change(f"recompute {count} of {len(paths)} blocks", how, candidates)

    def by_kind(self, name: str, moves: bool) -> Iterator[Change]:
        """Yield the best choice of those that treat all blocks alike, with offload or without."""
        found = []
        for indices in treatments(self._profile):
            candidates = [self._profile.candidates(i)[k] for i, k in enumerate(indices)]
            if moves == any(each.bytes_moved for each in candidates) and not all(
                isinstance(each.strategy, Keep | Recompute) for each in candidates
            ):
                found.append(candidates)
        if not found:
            return
        best = self._best(found)
        largest = max(best, key=lambda candidate: candidate.bytes_moved)
        yield self._change(name, self._fit_to(self._predict(best).peak), best, largest.describe())

    def plan(self) -> Iterator[Change]:
        """Yield a plan for the memory of the device; if all fits, for half of what can be saved.

        Where no plan fits the device, that is a change that does not help.
        """
        recomputing = self._recomputing(len(self._profile.order))
        ways = self._profile.with_each_rest()
        least = min(simulate(way, recomputing).peak for way in ways)
        half = (least + self._plain.peak + 1) // 2
        for limit in dict.fromkeys((self._limit or half, half)):
            name = f"a plan for {format_bytes(limit)}"
            try:
                plan = solved(self._profile, limit)
            except BudgetError as error:
                now = self._plain
                yield Change(name, "", now.peak, 0, now.seconds, now.at, str(error))
            else:
                candidates = [candidate for _, _, candidate in plan.blocks]
                note = ", ".join(f"{path}: {strategy}" for path, _, strategy in plan.heads)
                found = simulate(self._profile.with_heads(plan.heads), candidates)
                yield self._change(name, self._fit_to(limit), candidates, note, found)
                return

    def _recomputing(self, count: int) -> list[Candidate]:
        """The candidates that recompute so many of the blocks, the first ones of the forward."""
        paths = list(dict.fromkeys(path for path, _ in self._profile.order))[:count]
        candidates = plain_candidates(self._profile)
        for i, (path, _) in enumerate(self._profile.order):
            if path in paths:
                menu = self._profile.candidates(i)
                candidates[i] = next(each for each in menu if each.strategy == Recompute())
        return candidates

    def _best(self, choices: list[list[Candidate]]) -> list[Candidate]:
        """The fastest that fits; where nothing has to, the lowest that takes a tenth more time."""
        found = [(self._predict(candidates), candidates) for candidates in choices]
        if self._limit is None:
            longest = (1 + _USUAL) * self._plain.seconds
            quick = [each for each in found if each[0].seconds <= longest]
            if not quick:
                return min(found, key=lambda each: each[0].seconds)[1]
            return min(quick, key=lambda each: (each[0].peak, each[0].seconds))[1]
        fitting = [each for each in found if each[0].peak <= self._limit]
        if fitting:
            return min(fitting, key=lambda each: each[0].seconds)[1]
        return min(found, key=lambda each: (each[0].peak, each[0].seconds))[1]

    def _fits(self, candidates: Sequence[Candidate]) -> bool:
        return self._limit is not None and self._predict(candidates).peak <= self._limit

    def _predict(self, candidates: Sequence[Candidate]) -> Prediction:
        return self._timeline.predict_candidates(candidates)

    def _fit_to(self, peak: int) -> str:
        return f'rekindle.fit(model, batch, budget="{format_budget(peak)}")'

    def _change(
        self,
        name: str,
        how: str,
        by: Sequence[Candidate],
        note: str = "",
        predicted: Prediction | None = None,
    ) -> Change:
        """Compare a step by these candidates with the plain one; predicted, if it was not."""
        found = self._predict(by) if predicted is None else predicted
        saved = self._plain.peak - found.peak
        replayed = [
            path or "the model"
            for (path, _), each in zip(self._profile.order, by, strict=True)
            if not isinstance(each.strategy, Keep)
        ]
        at = found.at
        if at.removeprefix("the backward of ") in replayed:
            at = at.replace("the backward of", "the replay and backward of")
        return Change(name, how, found.peak, saved, found.seconds, at, note)


def _recomputing_first(paths: list[str]) -> str:
    """The code of a dict that has modules recomputed; empty if it would be long.

    >>> _recomputing_first(["layers.0", "layers.1"])
    '{f"layers.{i}": "recompute" for i in range(2)}'
    >>> _recomputing_first(["stem"])
    '{"stem": "recompute"}'
    """
    counted = [f"{_counted_from(paths[0])}{i}" for i in range(len(paths))]
    if len(paths) > 1 and counted == paths:
        key = f'f"{_counted_from(paths[0])}{{i}}"'
        return f'{{{key}: "recompute" for i in range({len(paths)})}}'
    if len(paths) > _LISTED:
        return ""
    return "{" + ", ".join(f'"{path}": "recompute"' for path in paths) + "}"


def _counted_from(path: str) -> str:
    """The part of a path before the number that it ends in."""
    return path.rstrip("0123456789")
