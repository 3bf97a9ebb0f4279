"""Text of profiles and plans, which they print as."""

from rekindle.modules.patterns import spanned
from rekindle.planner.as_text import as_text
from rekindle.planner.plan import Plan
from rekindle.planner.rest import Rest
from rekindle.planner.types import Candidate, Nearby, Profile
from rekindle.sizes import format_bytes


@as_text.register
def format_profile(profile: Profile) -> str:
    """The text of a profile: its blocks with their candidates, and the rest of the step."""
    counts = f"{len(profile.order)} blocks, {len(profile.blocks)} distinct"
    always = f"always there: {format_bytes(profile.static_bytes)}"
    rests = "; ".join(map(format_rest, (profile.rest, *profile.rests)))
    lines = [f"{profile.model} on {profile.device}: {counts}", f"  {always}; {rests}"]
    for block in profile.blocks:
        lines.append(f"  {block.kind}:")
        lines += [f"    {_format_candidate(each)}" for each in block.candidates]
    return "\n".join(lines)


def format_rest(rest: Rest) -> str:
    """One way to run what is outside the blocks, with what it costs."""
    heads = ", ".join(f"with {path} by {strategy}" for path, _, strategy in rest.heads)
    costs = f"{format_bytes(rest.rest_peak)}, {rest.rest_seconds * 1e3:.1f} ms"
    return f"{heads or 'outside the blocks'}: {costs}"


@as_text.register
def format_plan(plan: Plan) -> str:
    """The text of a plan: its peak and time, and the strategy of each group of blocks."""
    lines = [format_plan_title(plan)]
    lines += [f"  {name:<14}  {text}" for name, text in plan_figures(plan)]
    for where, kind, count, candidate in grouped_blocks(plan):
        lines.append(f"  {where or kind}: {count} x {kind}: {_format_candidate(candidate)}")
    lines += [f"  {path}: 1 x {kind}: {strategy}" for path, kind, strategy in plan.heads]
    return "\n".join(lines)


def format_plan_title(plan: Plan) -> str:
    """The model and the budget of a plan."""
    title = f"Plan for {plan.model} within {format_bytes(plan.budget)}"
    return f"{title}: fits as it is" if plan.keeps_all else title


def plan_figures(plan: Plan) -> list[tuple[str, str]]:
    """Names and texts of a plan's figures, for people."""
    peak = f"{format_bytes(plan.predicted_peak)} in {plan.peak_at}"
    seconds = f"{plan.predicted_time * 1e3:.1f} ms a step"
    if not plan.keeps_all:
        peak += f" (without a plan {format_bytes(plan.plain_peak)})"
        seconds += f" ({plan.slowdown:.2f}x without a plan)"
    figures = [("predicted peak", peak), ("predicted time", seconds)]
    if plan.measured_peak is not None and plan.measured_time is not None:
        time = f"{plan.measured_time * 1e3:.1f} ms a step"
        figures.append(("measured", f"{format_bytes(plan.measured_peak)}, {time}"))
    if plan.offloads:
        moved = sum(candidate.bytes_moved for _, _, candidate in plan.blocks)
        figures.append(("moved away", f"{format_bytes(moved)} to {_tiers(plan)}"))
    if plan.compiled:
        count = len({path for path, _, _ in plan.blocks})
        figures.append(("compiled", f"{len(plan.compiled)} of {count} blocks, each by itself"))
    if plan.verified is not None:
        figures.append(("verified", plan.verified))
    figures += _nearby("with less", plan.less, plan.predicted_time)
    figures += _nearby("with more", plan.more, plan.predicted_time)
    return figures


def grouped_blocks(plan: Plan) -> list[tuple[str, str, int, Candidate]]:
    """Blocks of one class with one candidate: their paths as one text, class, number, candidate."""
    groups: dict[tuple[Candidate, str], list[str]] = {}
    for path, kind, candidate in plan.blocks:
        groups.setdefault((candidate, kind), []).append(path)
    return [
        (
            spanned(paths),
            kind,
            len(paths),
            candidate,
        )
        for (candidate, kind), paths in groups.items()
    ]


def _tiers(plan: Plan) -> str:
    """The places that a plan moves results to, in words."""
    tiers = {candidate.tier for _, _, candidate in plan.blocks}
    names = {"host": "host memory", "disk": "disk"}
    return " and ".join(name for tier, name in names.items() if tier in tiers)


def _nearby(words: str, near: Nearby | None, seconds: float) -> list[tuple[str, str]]:
    """A figure for what another budget would change; none if that is not known."""
    if near is None:
        return []
    if near.seconds is None:
        change = "no plan fits"
    elif abs(near.seconds - seconds) < 5e-6:
        change = "no change in time"
    else:
        change = f"{(near.seconds - seconds) * 1e3:+.2f} ms a step"
    return [(words, f"{format_bytes(near.budget)}: {change}")]


def _format_candidate(candidate: Candidate) -> str:
    moved = f", {format_bytes(candidate.bytes_moved)} moved" if candidate.bytes_moved else ""
    return (
        f"{candidate.describe()}: {format_bytes(candidate.bytes_held)} held{moved}, "
        f"{candidate.seconds * 1e3:.2f} ms"
    )
