"""A plan for a budget, by a profile alone."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rekindle.errors import RekindleError
from rekindle.modules.patterns import spanned
from rekindle.planner.plan import Plan
from rekindle.planner.ranks.rank_sync import all_gather, on_first_rank
from rekindle.planner.rest import Heads, is_exact
from rekindle.planner.timeline import OUTSIDE_BLOCKS, simulate
from rekindle.planner.types import Candidate, Prediction, Profile, Solution
from rekindle.sizes import format_bytes, parse_bytes, rounded_up
from rekindle.strategy import Keep, Recompute, is_exact_strategy


class BudgetError(RekindleError):
    """No plan keeps a training step within the budget."""


def solved(profile: Profile, limit: int) -> Plan:
    """The plan for a budget; an error that says what would work, if there is none."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    def chosen() -> Solution:
        plain = plain_prediction(profile)
        if plain.peak <= limit:  # a plan only adds to a plain step
            return Solution(tuple(plain_candidates(profile)), plain, 0.0)
        choice = solver.choose(profile, limit) or recompute_all(profile, limit)
        if choice is not None:
            return choice
        raise BudgetError(_format_least(profile, limit, solver.least_peak(profile).prediction))

    return plan_chosen(profile, limit, chosen)


def recompute_all(profile: Profile, limit: int) -> Solution | None:
    """The choice that recomputes every block, if its step was measured to be within a limit.

    What was measured counts, whatever the timeline predicts.
    """
    menus = [profile.candidates(i) for i in range(len(profile.order))]
    candidates = [each for menu in menus for each in menu if each.strategy == Recompute()]
    if len(candidates) < len(menus):  # a profile with some of its candidates
        return None
    fitting = []
    for each in profile.with_each_rest():
        if each.recompute_peak is None or each.recompute_peak > limit:
            continue
        found = simulate(each, candidates)
        seconds = each.recompute_seconds or found.seconds
        measured = replace(found, peak=min(found.peak, each.recompute_peak), seconds=seconds)
        fitting.append(Solution(tuple(candidates), measured, 1.0, each.heads))
    return min(fitting, key=lambda choice: choice.prediction.seconds, default=None)


def least_recompute_peak(profile: Profile) -> int | None:
    """The lowest measured peak of a step with every block recomputed; None if there is none."""
    peaks = [rest.recompute_peak for rest in (profile.rest, *profile.rests)]
    return min((peak for peak in peaks if peak is not None), default=None)


def _format_least(profile: Profile, limit: int, least: Prediction) -> str:
    """The text of an error: the least that is predicted to work, and what would help."""
    peak = min(least.peak, least_recompute_peak(profile) or least.peak)
    return format_too_large(profile, limit, replace(least, peak=peak), "The least that works is")


def format_too_large(profile: Profile, limit: int, least: Prediction, what: str) -> str:
    """The text of an error: what the leanest plan takes and consists of, and what would help."""
    peak, static = rounded_up(least.peak), profile.static_bytes
    text = (
        f"No plan fits into {format_bytes(limit, of=peak)}. {what} "
        f"{format_bytes(peak)}, of which {format_bytes(static, of=peak)} are parameters, "
        f"gradients, optimizer state and the batch; the peak is in {least.at}."
    )
    if static >= limit:
        return (
            f"{text} No activation would fit: shard the model, offload the optimizer's state, "
            "train fewer parameters, or use a smaller dtype. rekindle.explain says what holds it."
        )
    share = int(100 * (limit - static) / (peak - static))
    batch = f"A batch of about {share} % of this one" if share else "A far smaller batch"
    help_ = [f"{batch} would fit"]
    if least.at == OUTSIDE_BLOCKS and not profile.rests:
        help_.append("rekindle.linear_cross_entropy takes less for a head and its loss")
    elif least.at != OUTSIDE_BLOCKS and not profile.bytes_per_second:
        help_.append("spill=True moves activations to disk")
    return f"{text} {'; '.join(help_)}. rekindle.explain says what holds it."


def format_least_inexact(profile: Profile, limit: int) -> str:
    """The text of what a plan that need not be exact takes at least; empty if there is none."""
    from rekindle.planner.solve import solver  # noqa: PLC0415

    least = solver.least_peak(profile)
    chosen = zip(profile.order, least.candidates, strict=True)
    parts = [f"{path}: {strategy}" for path, _, strategy in least.heads]
    tiled = defaultdict[str, list[str]](list)
    for (path, _), candidate in chosen:
        if not is_exact_strategy(candidate.strategy):
            tiled[candidate.describe()].append(path)
    parts += [f"{spanned(list(dict.fromkeys(paths)))}: {how}" for how, paths in tiled.items()]
    if is_exact(least.heads) and not tiled:
        return ""
    peak = least.prediction.peak
    fits = "fits" if peak <= limit else "does not fit either"
    return f"exact=False {fits}: it takes {format_bytes(rounded_up(peak))}, by {'; '.join(parts)}."


def plan_chosen(profile: Profile, limit: int, choose: Callable[[], Solution]) -> Plan:
    """The plan by what the first rank chooses: a solver that stops by the clock chooses anything.

    Each rank has the candidates of its own profile at the places in the menus that were chosen.
    """

    def decision() -> tuple[list[int], Solution]:
        choice = choose()
        menus = (profile.candidates(i) for i in range(len(profile.order)))
        places = [menu.index(o) for menu, o in zip(menus, choice.candidates, strict=True)]
        return places, replace(choice, candidates=())

    places, choice = on_first_rank(decision)
    candidates = [profile.candidates(i)[place] for i, place in enumerate(places)]
    return plan_by(profile, limit, candidates, choice.prediction, choice.gap, choice.heads)


def with_nearby(profile: Profile, plan: Plan) -> Plan:
    """A plan, with what less memory and more would change."""
    from rekindle.planner.sensitivity import nearby  # noqa: PLC0415

    candidates = tuple(candidate for _, _, candidate in plan.blocks)
    now = Prediction(plan.predicted_peak, plan.predicted_time)
    solution = Solution(candidates, now, 0.0, plan.heads)
    less, more = on_first_rank(lambda: nearby(profile, plan.budget, solution))
    return replace(plan, less=less, more=more)


def plan_by(
    profile: Profile,
    budget: int,
    candidates: Sequence[Candidate],
    found: Prediction,
    gap: float,
    heads: Heads = (),
) -> Plan:
    """Options for the blocks and the heads as a plan, with what was found of them."""
    plain = plain_prediction(profile)
    return Plan(
        model=profile.model,
        batch=profile.batch,
        device=profile.device,
        budget=budget,
        predicted_peak=found.peak,
        predicted_time=found.seconds,
        plain_peak=plain.peak,
        plain_time=min(plain.seconds, found.seconds),  # a plan only adds to a plain step
        gap=min(gap, 1.0),
        peak_at=found.at,
        blocks=tuple(
            (path, profile.blocks[index].kind, candidate)
            for (path, index), candidate in zip(profile.order, candidates, strict=True)
        ),
        heads=heads,
        inputs=profile.inputs,
        unused=profile.unused,
        left_out=profile.left_out,
        compiled=profile.compiled,
        planning_peak=profile.planning_peak,
        profile=profile,
    )


def plain_prediction(profile: Profile) -> Prediction:
    """The peak and time of a step without a plan."""
    return simulate(profile, plain_candidates(profile))


def plain_candidates(profile: Profile) -> list[Candidate]:
    """The candidates by which every block runs as without a plan."""
    menus = (profile.candidates(i) for i in range(len(profile.order)))
    return [next(candidate for candidate in menu if candidate.strategy == Keep()) for menu in menus]


def budget_bytes(profile: Profile, budget: int | str) -> int:
    """A budget in bytes: as given, or a share of the activations' peak on top of what is static.

    The least of all ranks'.
    """
    share = checked_budget(budget)
    if isinstance(share, float):
        activations = plain_prediction(profile).peak - profile.static_bytes
        share = profile.static_bytes + int(share * activations)
    return min(all_gather(share))


def refuse_unlikely_budget(budget: Any) -> None:
    """Refuse a budget that means something else than it says, before anything runs.

    >>> refuse_unlikely_budget(8)
    Traceback (most recent call last):
    ValueError: budget=8 is 8 bytes: "8GiB", perhaps?
    """
    nbytes = checked_budget(budget)
    has_unit = isinstance(budget, str) and not budget.strip().isdecimal()
    if not has_unit and isinstance(nbytes, int) and nbytes < _LEAST:
        raise ValueError(f'budget={budget!r} is {nbytes} bytes: "{nbytes}GiB", perhaps?')


_LEAST = 1024
"""Bytes below which no step can be: a number below it was meant with a unit."""


def checked_budget(budget: Any) -> int | float:
    """A budget as bytes, or as a share."""
    _refuse_bare_share(budget)
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f'A budget as a share is like "40%", but got {budget!r}') from None
        if not 0 < share < 100:
            raise ValueError(
                f"A budget as a share is above 0% and below 10000%, but got {budget!r}"
            )
        return share
    nbytes = parse_bytes(budget, "budget")
    if nbytes <= 0:
        raise ValueError(f"A budget is a number of bytes above 0, but got {budget!r}")
    return nbytes


def _refuse_bare_share(budget: Any) -> None:
    """Refuse 0.5 and "0.5", which may be a share or bytes."""
    try:
        share = float(budget) if isinstance(budget, float | str) else 0.0
    except ValueError:
        return
    if 0 < share < 1:
        kind = TypeError if isinstance(budget, float) else ValueError
        raise kind(
            f'budget={budget!r} may be a share or bytes: "{100 * share:g}%" is a share of the '
            f'activations, "{share:g}GiB" is bytes'
        )
