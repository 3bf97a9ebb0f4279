"""Text of explanations, which they print as."""

from collections.abc import Iterable

from rekindle.explanation.types import Change, Explanation, SavedActivation, Share
from rekindle.modules.patterns import generalized
from rekindle.planner.as_text import as_text
from rekindle.sizes import format_bytes

_ROWS = 8
"""Rows of a table, at most."""
_KINDS = 2
"""Kinds of memory that are named beside a module."""
_SOURCES = {
    "device": "recorded on the device",
    "fake tensors": "recorded without memory",
    "recompute": "recorded with every block recomputed",
}


@as_text.register
def format_explanation(found: Explanation) -> str:
    """The text of an explanation: the peak, tables of what is there then, and the changes."""
    lines = [
        f"{found.model} on {found.device}, {_SOURCES[found.source]}",
        f"  peak  {format_bytes(found.peak)} in {found.peak_at}",
    ]
    if found.device_bytes is not None:
        lines.append(f"  memory  {format_bytes(found.device_bytes)}: {format_fit(found.fits)}")
    kinds = [share for share in found.kinds if share.highest]
    lines += _table("kind", sorted(kinds, key=lambda each: -each.at_peak))
    lines += _table("module", grouped_modules(found), with_most=False)
    lines += _table("line", (each for each in found.lines if each.highest))
    lines += _table("op", (each for each in found.ops if each.highest))
    if found.saved:
        lines.append("  largest saved tensors")
        lines += [f"    {format_saved(each)}" for each in found.saved[:_ROWS]]
    if found.changes:
        lines.append("  changes, the most useful first")
        lines += [line for each in found.changes for line in _format_change(found, each)]
    lines += [f"  also: {each.name}: {format_effect(found, each)}" for each in found.others]
    lines += [f"  no help: {format_unhelpful(each)}" for each in found.unhelpful]
    return "\n".join(lines)


def format_fit(fits: bool | None) -> str:
    """The words that say whether a step fits."""
    return "the step fits" if fits else "the step does not fit"


def _table(title: str, shares: Iterable[Share], with_most: bool = True) -> list[str]:
    """Rows of a name with its bytes at the peak, and at most, under a title."""
    rows = list(shares)[:_ROWS]
    if not rows:
        return []
    width = max(len(title), *(len(each.name) for each in rows))
    lines = [f"  {title:<{width}}  {'at peak':>10}" + ("     at most" if with_most else "")]
    for each in rows:
        row = f"  {each.name:<{width}}  {format_bytes(each.at_peak):>10}"
        row += f"  {format_bytes(each.highest):>10}" if with_most else ""
        lines.append(f"{row}  {_shortened(each.about)}".rstrip())
    return lines


def _shortened(text: str, length: int = 48) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def grouped_modules(found: Explanation) -> list[Share]:
    """The modules that hold most at the peak, without those inside them; layers alike are one.

    Each is about the kinds that it holds.
    """
    own = {each.name: list(each.kinds) for each in found.modules}
    for each in found.modules:
        outer = _outer(each.name, own)
        if outer is not None:
            own[outer] = [a - b for a, b in zip(own[outer], each.kinds, strict=True)]
    groups: dict[str, list[str]] = {}
    for name in own:
        groups.setdefault(generalized(name), []).append(name)
    rows = []
    for name, paths in groups.items():
        kinds = tuple(map(sum, zip(*(own[path] for path in paths), strict=True)))
        count = f" ({len(paths)})" if len(paths) > 1 else ""
        title = f"{name or found.model}{count}"
        rows.append(Share(title, _format_kinds(found, kinds), sum(kinds), sum(kinds), kinds))
    return sorted((row for row in rows if row.at_peak), key=lambda row: -row.at_peak)


def _format_kinds(found: Explanation, kinds: tuple[int, ...]) -> str:
    """The kinds of which there is most."""
    pairs = sorted(zip(kinds, found.kind_names, strict=True), reverse=True)[:_KINDS]
    return ", ".join(f"{name} {format_bytes(nbytes)}" for nbytes, name in pairs if nbytes)


def _outer(name: str, known: dict[str, list[int]]) -> str | None:
    """The innermost known module around one; None for the model itself."""
    if not name:
        return None
    outer = name.rpartition(".")[0]
    while outer and outer not in known:
        outer = outer.rpartition(".")[0]
    return outer


def format_saved(each: SavedActivation) -> str:
    """One line on saved tensors that are alike."""
    many = f"{each.count} x " if each.count > 1 else ""
    shape = f"{each.dtype}{list(each.shape)}"
    where = generalized(each.modules[0]) if each.count > 1 else each.modules[0]
    parts = [f"{format_bytes(each.nbytes)}: {many}{shape} by {each.op}"]
    parts += [f"in {where}"] if where else []
    parts += [f"at {each.line}"] if each.line else []
    needed = ", ".join(each.needed_by[:2]) + (", …" if len(each.needed_by) > 2 else "")
    return " ".join(parts) + (f"; for {needed}" if needed else "")


def _format_change(found: Explanation, change: Change) -> list[str]:
    lines = [f"    {change.name}: {format_effect(found, change)}"]
    if change.note:
        lines.append(f"      ({change.note})")
    if change.how:
        lines.append(f"      {change.how}")
    return lines


def format_effect(found: Explanation, change: Change) -> str:
    """A few words on the bytes that a change saves, and on its cost."""
    words = [f"-{format_bytes(change.saved)}"]
    if change.seconds is not None:
        words.append(f"{100 * (change.seconds / found.seconds - 1):+.1f} % time")
    words.append(f"peak {format_bytes(change.peak)}")
    if change.fits is not None and not found.fits:
        words.append("fits" if change.fits else "does not fit")
    return ", ".join(words)


def format_unhelpful(change: Change) -> str:
    """The reason why a change does not help."""
    return f"{change.name}: {change.note}"
