"""Compares the gradients of a step under a plan with those of the same step by other means.

The other step, the reference, runs each block the other way, as far as memory allows: what the plan
keeps is recomputed, and what it recomputes, moves or derives is kept. So each gradient is made in
two ways, and a plan whose engines are wrong is never applied.

Note [Gradients that do not repeat]. Some kernels add up in an order that changes from run to run,
so two steps that are right may differ. Where gradients differ, the reference is run again. If it
does not repeat itself either, the plan's distance from it has to be within a multiple of the
reference's own spread. If it repeats itself bit for bit, what differs is the plan.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rekindle.errors import RekindleError
from rekindle.modules.apply_strategies import apply, undo
from rekindle.modules.unwrapping import in_places
from rekindle.planner.gradient_fingerprints import Fingerprint, Fingerprints, differing_keys
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.plan import Plan
from rekindle.planner.ranks.rank_sync import all_gather, first_message, raised_on_all_ranks
from rekindle.planner.timeline import simulate
from rekindle.planner.training_step import TrainingStep
from rekindle.planner.types import Candidate, Profile
from rekindle.strategy import Keep, Recompute, Strategy

BIT_FOR_BIT = "gradients bit for bit"
_AGAIN = 2
"""How often the reference is run again where gradients differ."""
_MULTIPLE = 4.0
"""How many times the reference's own spread a plan's gradients may be away from it."""
_NAMED = 3
"""Parameters that an error names."""


class GradientError(RekindleError):
    """A step under a plan has other gradients than the same step without it."""


def verify_gradients(
    step: TrainingStep, plan: Plan, found: Fingerprints, measured: Profile, limit: int
) -> str | None:
    """Compare the gradients of a step under a plan with those of a reference.

    Returns what was found; None if no other way of running the blocks fits the limit. An error if
    the gradients are wrong. All ranks run the same number of steps.
    """
    fates = reference_for(plan, measured, limit)
    changed = {p for p, _, candidate in plan.blocks if candidate.strategy != _WHOLE[fates[p]]}
    if not changed:
        return None
    how = f"with {len(changed)} of {len(fates)} blocks run another way"
    reference = _gradients(step, fates)
    others = differing_keys(found, reference)
    count = max(all_gather(len(others)))
    if not count:
        return f"{BIT_FOR_BIT}, {how}"
    again = [_gradients(step, fates) for _ in range(_AGAIN)]
    wrong = [key for key in others if not _is_within(found[key], reference[key], again, key)]
    error = _told(plan, found, reference, wrong) if wrong else None
    if (told := first_message(error)) is not None:
        raise raised_on_all_ranks(GradientError(told))
    parameters = "1 parameter" if count == 1 else f"{count} parameters"
    return f"{BIT_FOR_BIT} but for {parameters}, within the run-to-run spread, {how}"


def reference_for(plan: Plan, measured: Profile, limit: int) -> dict[str, str]:
    """A fate for each block, other than the plan's where memory allows: keep or recompute.

    Where it does not for all, at first one block of each kind, then a second, and so on.
    """
    planned = {path: candidate.strategy for path, _, candidate in plan.blocks}
    fates = dict.fromkeys(planned, "recompute")
    for path in _kinds_in_turn(measured):
        if planned[path] != Keep():
            fates[path] = "keep"
            if simulate(measured, _candidates(measured, fates)).peak > limit:
                fates[path] = "recompute"
    return fates


def _kinds_in_turn(measured: Profile) -> list[str]:
    """The blocks: the first of each kind, then the second of each, and so on."""
    count: Counter[int] = Counter()
    turns: dict[str, int] = {}
    for path, kind in measured.order:
        if path not in turns:
            turns[path] = count[kind]
            count[kind] += 1
    return sorted(turns, key=turns.__getitem__)


_WHOLE: dict[str, Strategy] = {"keep": Keep(), "recompute": Recompute()}


def _candidates(measured: Profile, fates: dict[str, str]) -> list[Candidate]:
    """The candidates that stand for fates; where a block has none such, the leanest."""
    found = []
    for i, (path, _) in enumerate(measured.order):
        menu = measured.candidates(i)
        fitting = [candidate for candidate in menu if candidate.strategy == _WHOLE[fates[path]]]
        found.append(min(fitting or menu, key=lambda candidate: candidate.bytes_held))
    return found


def _gradients(step: TrainingStep, fates: dict[str, str]) -> Fingerprints:
    """The gradients of one step by some fates, from the state that the model is in; it stays so."""
    with repeatable(step):
        apply(step.model, in_places(step.model, fates))
        found = step.fingerprints()
        undo(step.model)
    return found


def _is_within(
    found: Fingerprint, reference: Fingerprint, again: list[Fingerprints], key: Any
) -> bool:
    """Whether a gradient is as close to the reference as the reference is to itself."""
    repeats = [each[key] for each in again if key in each]
    if all(map(reference.is_same, repeats)):
        return False
    if any(map(found.is_same, repeats)):
        return True
    spread = max(map(reference.distance, repeats))
    away = min(map(found.distance, [reference, *repeats]))
    return away <= _MULTIPLE * spread + reference.epsilon * reference.norm


def _told(plan: Plan, found: Fingerprints, reference: Fingerprints, wrong: Sequence[Any]) -> str:
    named = [
        f"  {_place(key, plan)}: off by {_share(found[key], reference[key])}"
        for key in wrong[:_NAMED]
    ]
    if len(wrong) > _NAMED:
        named.append(f"  and {len(wrong) - _NAMED} more")
    begin = "A step under the plan has other gradients than the same step without it, which repeats"
    end = "The plan is not applied. This is a bug in rekindle: please report it with the model"
    return "\n".join([f"{begin} bit for bit:", *named, f"{end}."])


def _place(key: Any, plan: Plan) -> str:
    """A parameter, and what the plan does with its block."""
    if isinstance(key, Tensor):
        return f"a tensor of shape {list(key.shape)} outside the model"
    around = [
        (path, candidate)
        for path, _, candidate in plan.blocks
        if not path or str(key).startswith(f"{path}.")
    ]
    if not around:
        return f"{key} (outside the blocks)"
    path, candidate = around[0]
    return f"{key} ({path or 'the model'}: {candidate.describe()})"


def _share(found: Fingerprint, reference: Fingerprint) -> str:
    if not reference.norm:
        return f"{found.distance(reference):.2g}, where it is 0"
    return f"{found.distance(reference) / reference.norm:.2g} of its norm"
