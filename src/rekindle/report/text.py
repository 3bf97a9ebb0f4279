"""Text of profiles and plans, which they print as."""

from rekindle.modules.patterns import spanned
from rekindle.planner.as_text import as_text
from rekindle.planner.plan import Plan
from rekindle.planner.types import Candidate, Nearby, Profile
from rekindle.sizes import format_bytes


@as_text.register
def format_profile(profile: Profile) -> str:
    """The text of a profile: its blocks with their candidates, and the rest of the step."""
    counts = f"{len(profile.order)} blocks, {len(profile.blocks)} distinct"
    rest = f"outside the blocks: {profile.rest_seconds * 1e3:.1f} ms"
    lines = [
        f"{profile.model} on {profile.device}: {counts}",
        f"  always there: {format_bytes(profile.static_bytes)}; {rest}",
    ]
    for block in profile.blocks:
        lines.append(f"  {block.kind}:")
        lines += [f"    {_format_candidate(each)}" for each in block.candidates]
    return "\n".join(lines)


@as_text.register
def format_plan(plan: Plan) -> str:
    """The text of a plan: its peak and time, and the strategy of each group of blocks."""
    title = f"Plan for {plan.model} within {format_bytes(plan.budget)}"
    peak = f"  predicted peak  {format_bytes(plan.predicted_peak)} in {plan.peak_at}"
    seconds = f"  predicted time  {plan.predicted_time * 1e3:.1f} ms a step"
    if plan.keeps_all:
        lines = [f"{title}: fits as it is", peak, seconds]
    else:
        plain = f"(without a plan {format_bytes(plan.plain_peak)})"
        lines = [title, f"{peak} {plain}", f"{seconds} ({plan.slowdown:.2f}x without a plan)"]
    if plan.measured_peak is not None and plan.measured_time is not None:
        lines.append(
            f"  measured        {format_bytes(plan.measured_peak)}, "
            f"{plan.measured_time * 1e3:.1f} ms a step"
        )
    if plan.offloads:
        moved = sum(candidate.bytes_moved for _, _, candidate in plan.blocks)
        lines.append(f"  moved away      {format_bytes(moved)} to {_tiers(plan)}")
    if plan.verified is not None:
        lines.append(f"  verified        {plan.verified}")
    lines += _nearby("with less", plan.less, plan.predicted_time)
    lines += _nearby("with more", plan.more, plan.predicted_time)
    groups: list[tuple[Candidate, str, list[str]]] = []
    for path, kind, candidate in plan.blocks:
        for known, name, paths in groups:
            if known == candidate and name == kind:
                paths.append(path)
                break
        else:
            groups.append((candidate, kind, [path]))
    for candidate, kind, paths in groups:
        where = (
            spanned(paths) if len({path.count(".") for path in paths}) == 1 else ", ".join(paths)
        )
        lines.append(f"  {where or kind}: {len(paths)} x {kind}: {_format_candidate(candidate)}")
    return "\n".join(lines)


def _tiers(plan: Plan) -> str:
    """The places that a plan moves results to, in words."""
    tiers = {candidate.tier for _, _, candidate in plan.blocks}
    names = {"host": "host memory", "disk": "disk"}
    return " and ".join(name for tier, name in names.items() if tier in tiers)


def _nearby(words: str, near: Nearby | None, seconds: float) -> list[str]:
    """A line on what another budget would change; none if that is not known."""
    if near is None:
        return []
    if near.seconds is None:
        change = "no plan fits"
    elif abs(near.seconds - seconds) < 5e-6:
        change = "no change in time"
    else:
        change = f"{(near.seconds - seconds) * 1e3:+.2f} ms a step"
    return [f"  {words:<15} {format_bytes(near.budget)}: {change}"]


def _format_candidate(candidate: Candidate) -> str:
    moved = f", {format_bytes(candidate.bytes_moved)} moved" if candidate.bytes_moved else ""
    return (
        f"{candidate.describe()}: {format_bytes(candidate.bytes_held)} held{moved}, "
        f"{candidate.seconds * 1e3:.2f} ms"
    )
