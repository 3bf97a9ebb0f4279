"""The errors of a replay that does not match its forward: place, cause and cure.

Each function returns the error; the caller raises it. All of it runs once, when something is wrong.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rekindle.errors import CheckpointError
from rekindle.observation import region_name
from rekindle.regions.errors import call_sites
from rekindle.regions.errors.op_trace import describe, format_diff, meta

if TYPE_CHECKING:
    from rekindle.regions.errors.fingerprint import Drift
    from rekindle.regions.recompute.collect import Collector
    from rekindle.regions.recompute.recompute_region import RecomputeRegion
    from rekindle.regions.recompute.slots import Slot


def different(
    region: "RecomputeRegion", position: int, seen: Tensor | None, again: "Collector"
) -> CheckpointError:
    """The error of a replay that differs from its forward at `position`, where it saved `seen`.

    `again` is one more replay, which took down where it was.
    """
    where = again.replay_sites or []
    parted = (
        i for i, (a, b) in enumerate(zip(region.saved.sites, where, strict=False)) if a[:2] != b[:2]
    )
    first = min(position, next(parted, position))
    now = call_sites.look_up(where[first]) if first < len(where) else None
    if first == len(region.saved.slots):
        return _error(
            region,
            f"the forward saved {first} activations, the replay more.",
            f"The first one too many is saved by\n    {now and now.op}\n    {now}",
            _BRANCH,
        )
    then, slot = call_sites.look_up(region.saved.sites[first]), region.saved.slots[first]()
    found = again.tensors[first] if now is not None and first != position else seen
    return _error(
        region,
        f"activation {first + 1} of {len(region.saved)} is not what it was.",
        _side_by_side(
            (
                "saved",
                "" if slot is None else _meta(slot),
                "" if found is None else describe(found),
            ),
            ("by", then.op, now.op if now else "(gone when replayed once more)"),
            ("at", _place(then), _place(now) if now else ""),
            ("", then.source, now.source if now else ""),
        ),
        _cause_of_difference(slot, found, then, now),
    )


def fewer_saved(region: "RecomputeRegion", saved: int, missing: int) -> CheckpointError:
    """The error of a replay that ended before it had saved all that the forward did."""
    then, slot = call_sites.look_up(region.saved.sites[missing]), region.saved.slots[missing]()
    assert slot is not None, "only living slots are missed"
    return _error(
        region,
        f"the forward saved {len(region.saved)} activations, the replay {saved}.",
        f"The forward went on to save {_meta(slot)} by\n    {then.op}\n    {then}",
        _BRANCH,
    )


def drifted(region: "RecomputeRegion", drifts: "list[Drift]") -> CheckpointError:
    """The error of a replay whose activations have the shapes of the forward and other contents."""
    first = drifts[0]
    then = call_sites.look_up(region.saved.sites[first.position])
    return _error(
        region,
        f"{len(drifts)} of {len(region.saved)} activations have other values than in forward.",
        f"The first is activation {first.position + 1}, {first.what}: {first.how_much}.\n"
        f"It is saved by\n    {then.op}\n    {then}",
        "a nondeterministic op (atomics, `index_add`, some convolutions), a random generator that "
        "is not torch's, or a value outside the region that changed: a parameter updated "
        "between forward and backward, a global, an attribute",
        "make the region depend on its arguments alone; look at the ops before the place shown, "
        "and at what they read from outside.",
    )


def changed_in_place(
    region: "RecomputeRegion", position: int, expected: int, version: int
) -> CheckpointError:
    """The error for a tensor that was changed in place after an op of the region had saved it."""
    then = call_sites.look_up(region.saved.sites[position])
    return _error(
        region,
        "a tensor needed for backward was modified by an inplace operation.",
        f"What was saved by\n    {then.op}\n    {then}\n"
        f"is at version {version}; expected version {expected}.",
        "an in-place op, inside the region or between its forward and backward, on a tensor that "
        "an op of the region saved: an activation, or a parameter that an optimizer stepped. Plain "
        "autograd refuses it too",
        "the out-of-place form of that op, or backward before the step.",
    )


def argument_changed(region: "RecomputeRegion", argument: str) -> CheckpointError:
    """The error for a tensor argument that was changed in place: no replay can start from it."""
    return _error(
        region,
        f"its tensor argument {argument} was changed in place after the call.",
        "There is nothing left to replay the region from.",
        "an in-place op (`x += …`, `relu_`, `inplace=True`) on the argument, inside the region or "
        "between its call and backward",
        "the out-of-place form of that op, or pass `x.clone()`.",
    )


def state_lost(function: Any, name: str) -> CheckpointError:
    """The error for a tensor that an argument holds, which was changed in place and is used."""
    return CheckpointError(
        f"Region {region_name(function)} did not replay as it ran: {name}, a tensor that an "
        "argument holds, was changed in place after the call.\n"
        "There is nothing left to replay the region from.\n"
        "Likely cause: an in-place op on it (`copy_`, `index_copy_`, `+=`), between the call of "
        "the region and backward; or inside the region, for the first time in a while or on memory "
        "that two tensors share.\n"
        "Try: the out-of-place form of that op, or pass a copy."
    )


_BRANCH = (
    "the region took another path: a global or an attribute that decides a branch changed between "
    "forward and backward (a step counter, `requires_grad`, a cache that was filled)"
)
_TRY = "make the region depend on its arguments alone"
_TRY_DEBUG = "; `debug=True` shows the ops where forward and replay part"


def _error(
    region: "RecomputeRegion", headline: str, detail: str, cause: str, cure: str | None = None
) -> CheckpointError:
    if not region.options.preserve_rng_state:
        cause += ", or a random number: this region was called with preserve_rng_state=False"
    parts = [f"Region {region_name(region.function)} did not replay as it ran: {headline}", detail]
    if region.op_trace is not None:
        parts.append(format_diff(region.op_trace))
    left_alone = None if region.inputs.state is None else region.inputs.state.left_alone()
    if left_alone:
        parts.append(f"As they are now, not as in forward: {', '.join(left_alone)}.")
    parts.append(f"Likely cause: {cause}.")
    parts.append(
        f"Try: {cure or _TRY + ('.' if region.op_trace is not None else _TRY_DEBUG + '.')}"
    )
    return CheckpointError("\n".join(parts))


def _cause_of_difference(
    slot: "Slot | None", found: Tensor | None, then: call_sites.Site, now: call_sites.Site | None
) -> str:
    if slot is None or found is None or then != now:
        return _BRANCH
    if slot.meta[2] != found.device:
        return "a device that the region takes from outside: a global, a module that was moved"
    if slot.meta[1] != found.dtype:
        return "a dtype from outside: a module that was cast, autocast that a global switches"
    return (
        "a shape from outside: a global or an attribute that changed between forward and backward, "
        "or data (routing, masks, `nonzero`) that came out otherwise (a nondeterministic op, a "
        "random generator of your own); or `requires_grad` of a parameter changed, so that the op "
        "saves other tensors"
    )


def _meta(slot: "Slot") -> str:
    shape, dtype, device = slot.meta
    return meta(dtype, shape, device)


_WIDE = 64
"""Characters of a column before its text is cut."""


def _side_by_side(*rows: tuple[str, str, str]) -> str:
    table = [
        ("", "forward", "replay"),
        *((a, b, c) if a == "at" else (a, _cut(b), _cut(c)) for a, b, c in rows),
    ]
    label, left = (max(len(row[i]) for row in table) for i in (0, 1))
    return "\n".join(f"    {a.ljust(label)}  {b.ljust(left)}   {c}".rstrip() for a, b, c in table)


def _cut(text: str) -> str:
    """Long text without its middle."""
    half = _WIDE // 2
    return text if len(text) <= _WIDE else f"{text[: half - 1]}…{text[-half:]}"


def _place(site: call_sites.Site) -> str:
    """File and line of a site in full, and as much of its function's name as there is room for."""
    place = f"{site.file}:{site.line}"
    room = max(_WIDE - len(place) - len(" in "), 12)
    name = site.function if len(site.function) <= room else f"…{site.function[1 - room :]}"
    return f"{place} in {name}"
