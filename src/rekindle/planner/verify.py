"""Compares the gradients of a step under a plan with those of a reference step.

The reference runs each block by another strategy, as far as memory allows: a block that the plan
keeps is recomputed, and any other is kept. So each gradient is computed in two ways, and a plan
whose engines are wrong is never applied.

Note [Gradients that do not repeat]. Some kernels add up in an order that changes from run to run,
so two steps that are right may differ. Where gradients differ, the reference is run again, a few
times at most: as soon as its runs explain the plan's gradients, no more are needed. If each
gradient repeats bit for bit in all runs of the reference, what differs is the plan. If any does
not, the step as a whole does not repeat: some ops round otherwise in some runs only, and a
gradient that was the same in two or three runs may differ in the next. So the distance of a
gradient from the reference has to be within a multiple of a spread, the distance between runs:

- A gradient that did not repeat is judged by its own spread, or by that of all such gradients
  together, relative to their norm, if that is larger: its own may be small by chance.
- A gradient that repeated is judged by the largest relative spread of one that did not.

A gradient that is nothing but rounding errors has a relative spread above 1. So the spread of
other gradients allows a quarter of a norm at most: a gradient that repeats is refused if it is
zero, doubled, or that of another dropout mask, however noisy the others are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from math import isfinite, sqrt
from typing import Any, NamedTuple

from torch import Tensor

from rekindle.errors import RekindleError
from rekindle.modules.apply_strategies import apply_strategies, compile_blocks_alone, undo
from rekindle.modules.unwrapping import in_places
from rekindle.planner.gradient_fingerprints import (
    GradientFingerprint,
    GradientFingerprints,
    differing_keys,
)
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.plan import Plan
from rekindle.planner.ranks.rank_sync import all_gather, first_message, raised_on_all_ranks
from rekindle.planner.rest import is_exact
from rekindle.planner.timeline import simulate
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Candidate, Profile
from rekindle.strategy import Compiled, Keep, Recompute, Strategy, is_exact_strategy

BIT_FOR_BIT = "gradients bit for bit"
_REPEATS = 2
"""The most further runs of the reference where gradients differ."""
_MULTIPLE = 4.0
"""Distance of a plan's gradients from the reference that is allowed, in spreads of the latter."""
_LIMIT = 0.25
"""The most that the spread of other gradients allows, relative to a gradient's norm."""
_NAMED = 3
"""Parameters that an error names; of more, it says how many."""


class GradientError(RekindleError):
    """A step under a plan has other gradients than the same step without it."""


def verify_gradients(
    step: TrainingStep, plan: Plan, found: GradientFingerprints, profile: Profile, limit: int
) -> str | None:
    """Compare the gradients of a step under a plan with those of a reference.

    Returns the outcome as text; None if no other strategies for the blocks fit the limit. Raises a
    `GradientError` if the gradients are wrong. All ranks run the same number of steps.
    """
    strategies = reference_for(plan, profile, limit)
    planned = {path: candidate.strategy for path, _, candidate in plan.blocks}
    changed = {path for path, strategy in planned.items() if strategy != strategies[path]}
    is_head_changed = any(path not in strategies for path, _, _ in plan.heads)
    if not changed and not is_head_changed:
        return None
    head = " and the head" if is_head_changed else ""
    how = f"with {len(changed)} of {len(planned)} blocks{head} run another way"
    if not (is_exact(plan.heads) and all(map(is_exact_strategy, planned.values()))):
        how += ", and by rows or in tiles as in the plan where these are not exact"
    rounding = sum(not candidate.is_exact for _, _, candidate in plan.blocks)
    if rounding:
        how += f"; the graphs of {rounding} round otherwise than those without a plan"
    reference = _gradients(step, strategies, plan.compiled)
    others = differing_keys(found, reference)
    count = max(all_gather(len(others)))
    if not count:
        return f"{BIT_FOR_BIT}, {how}"
    runs, wrong = [reference], others
    spread: _Spread | None = None
    for _ in range(_REPEATS):
        runs.append(_gradients(step, strategies, plan.compiled))
        spread = _spread_of_step(runs)
        wrong = [key for key in others if not _is_within(key, found[key], runs, spread)]
        if not any(all_gather(bool(wrong))):
            break
    text = _format_error(plan, found, reference, wrong, spread) if wrong else None
    if (message := first_message(text)) is not None:
        raise raised_on_all_ranks(GradientError(message))
    parameters = "1 parameter" if count == 1 else f"{count} parameters"
    return f"{BIT_FOR_BIT} but for {parameters}, within the run-to-run spread, {how}"


def reference_for(plan: Plan, profile: Profile, limit: int) -> dict[str, Strategy]:
    """Return keep or recompute for each block: other than the plan's, where memory allows.

    Where memory does not allow it for all, one of each distinct block comes first, then a second.
    Heads that the plan has a strategy for run without it, if that fits, or did while profiling.
    What changes the last bits of gradients changes them in the reference as well.
    """
    planned = {path: candidate.strategy for path, _, candidate in plan.blocks}
    strategies = {path: _recomputed(strategy) for path, strategy in planned.items()}
    heads = plan.heads
    if heads and is_exact(heads):
        limit = max(limit, profile.recompute_peak or 0)
        if simulate(profile, _candidates(profile, strategies)).peak <= limit:
            heads = ()
    profile = profile.with_heads(heads)
    for path in _distinct_blocks_in_turn(profile):
        if planned[path] != Keep() and strategies[path] == Recompute():
            strategies[path] = Keep()
            if simulate(profile, _candidates(profile, strategies)).peak > limit:
                strategies[path] = Recompute()
    return {**strategies, **{path: strategy for path, _, strategy in heads}}


def _recomputed(planned: Strategy) -> Strategy:
    """The strategy that recomputes a block, and gives the bits of one that was planned.

    Graphs at another budget may fuse other ops, and round otherwise. What is not exact stays.
    """
    if isinstance(planned, Compiled):
        return replace(planned, inner=Recompute())
    return Recompute() if is_exact_strategy(planned) else planned


def _distinct_blocks_in_turn(profile: Profile) -> list[str]:
    """Return the blocks: the first of each distinct block, then the second of each, and so on."""
    count: Counter[int] = Counter()
    turns: dict[str, int] = {}
    for path, kind in profile.order:
        if path not in turns:
            turns[path] = count[kind]
            count[kind] += 1
    return sorted(turns, key=turns.__getitem__)


def _candidates(profile: Profile, strategies: dict[str, Strategy]) -> list[Candidate]:
    """Return the candidates with some strategies; where a block has none such, the leanest."""
    found = []
    for i, (path, _) in enumerate(profile.order):
        candidates = profile.candidates(i)
        fitting = [each for each in candidates if each.strategy == strategies[path]]
        found.append(min(fitting or candidates, key=lambda candidate: candidate.bytes_held))
    return found


def _gradients(
    step: TrainingStep, strategies: dict[str, Strategy], compiled: Iterable[str]
) -> GradientFingerprints:
    """Return the gradients of one step by some strategies; the model's state stays as it is."""
    with repeatable(step):
        compile_blocks_alone(step.model, compiled)
        apply_strategies(step.model, in_places(step.model, strategies))
        found = step.fingerprints()
        undo(step.model)
    return found


class _Spread(NamedTuple):
    """Relative distances between runs of the reference, of gradients that do not repeat."""

    largest: float
    together: float
    """The distance of all of them, relative to the norm of all of them."""


def _spread_of_step(runs: Sequence[GradientFingerprints]) -> _Spread | None:
    """Return the spread of the reference on all ranks; None if every gradient repeats."""
    reference = runs[0]
    keys = dict.fromkeys(key for again in runs[1:] for key in differing_keys(reference, again))
    found = [(_spread(_runs_of(key, runs)), reference[key].norm) for key in keys]
    found = [pair for pair in found if pair[1] and all(map(isfinite, pair))]
    of_ranks = all_gather((bool(keys), found))
    if not any(differs for differs, _ in of_ranks):
        return None
    pairs = [pair for _, of_rank in of_ranks for pair in of_rank]
    if not pairs:
        return _Spread(0.0, 0.0)
    largest = max(distance / norm for distance, norm in pairs)
    return _Spread(largest, _root(d for d, _ in pairs) / _root(norm for _, norm in pairs))


def _runs_of(key: Any, runs: Sequence[GradientFingerprints]) -> list[GradientFingerprint]:
    return [each[key] for each in runs if key in each]


def _spread(runs: Sequence[GradientFingerprint]) -> float:
    """Return the largest distance between two runs."""
    return max((one.distance(other) for one, other in combinations(runs, 2)), default=0.0)


def _root(numbers: Iterable[float]) -> float:
    return sqrt(sum(number**2 for number in numbers))


def _is_within(
    key: Any,
    found: GradientFingerprint,
    runs: Sequence[GradientFingerprints],
    spread: _Spread | None,
) -> bool:
    """Return whether a gradient is as close to the reference as the reference is to itself.

    See Note [Gradients that do not repeat].
    """
    if spread is None:
        return False
    references = _runs_of(key, runs)
    if any(map(found.is_same, references)):
        return True
    norm = references[0].norm
    repeats = all(map(references[0].is_same, references))
    of_others = min(_MULTIPLE * (spread.largest if repeats else spread.together), _LIMIT) * norm
    allowed = max(_MULTIPLE * _spread(references), of_others) + references[0].epsilon * norm
    return min(map(found.distance, references)) <= allowed


def _format_error(
    plan: Plan,
    found: GradientFingerprints,
    reference: GradientFingerprints,
    wrong: Sequence[Any],
    spread: _Spread | None,
) -> str:
    named = [
        f"  {_format_place(key, plan)}: off by {_format_distance(found[key], reference[key])}"
        for key in wrong[:_NAMED]
    ]
    if len(wrong) > _NAMED:
        named.append(f"  and {len(wrong) - _NAMED} more")
    begin = "A step under the plan has other gradients than the same step without it"
    runs = "which repeats bit for bit" if spread is None else "farther off than its runs are apart"
    end = (
        "The plan is not applied. Unless a block draws random numbers of numpy or Python, which no "
        "replay repeats, this is a bug in rekindle: please report it with the model"
    )
    return "\n".join([f"{begin}, {runs}:", *named, f"{end}."])


def _format_place(key: Any, plan: Plan) -> str:
    """A parameter's name, with the strategy of its block."""
    if isinstance(key, Tensor):
        return f"a tensor of shape {list(key.shape)} outside the model"
    described = [(path, candidate.describe()) for path, _, candidate in plan.blocks]
    described += [(path, str(strategy)) for path, _, strategy in plan.heads]
    for path, text in described:
        if not path or str(key).startswith(f"{path}."):
            return f"{key} ({path or 'the model'}: {text})"
    return f"{key} (outside the blocks)"


def _format_distance(found: GradientFingerprint, reference: GradientFingerprint) -> str:
    if not reference.norm:
        return f"{found.distance(reference):.2g}, where it is 0"
    return f"{found.distance(reference) / reference.norm:.2g} of its norm"
