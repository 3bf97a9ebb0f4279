"""The errors of a replay that does not match its forward: place, cause and cure.

Each function returns the error; the caller raises it. All of it runs once, when something is wrong.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from rekindle.errors import CheckpointError
from rekindle.observation import region_name
from rekindle.replay import sites
from rekindle.replay.trace import describe, format_diff, meta

if TYPE_CHECKING:
    from rekindle.replay.collect import Collected
    from rekindle.replay.fingerprint import Drift
    from rekindle.replay.frame import Frame, Slot


def different(frame: "Frame", position: int, again: "Collected") -> CheckpointError:
    """The replay saved something else in this place than the forward, or more than it."""
    where = again.where or []
    now = sites.look_up(where[position]) if position < len(where) else None
    if position == len(frame.slots):
        return _error(
            frame,
            f"the forward saved {position} activations, the replay more.",
            f"The first one too many is saved by\n    {now and now.op}\n    {now}",
            _BRANCH,
        )
    then, slot = sites.look_up(frame.sites[position]), frame.slots[position]()
    assert slot is not None, "only living slots are compared"
    found = again.tensors[position] if now is not None else None
    return _error(
        frame,
        f"activation {position + 1} of {len(frame.slots)} is not what it was.",
        _side_by_side(
            (
                "saved",
                _meta(slot),
                "nothing, when replayed once more" if found is None else describe(found),
            ),
            ("by", then.op, now.op if now else ""),
            ("at", str(then), str(now) if now else ""),
            ("", then.source, now.source if now else ""),
        ),
        _cause_of_difference(slot, found, then, now),
    )


def fewer_saved(frame: "Frame", saved: int, missing: int) -> CheckpointError:
    """The replay ended before it had saved all that the forward did."""
    then, slot = sites.look_up(frame.sites[missing]), frame.slots[missing]()
    assert slot is not None, "only living slots are missed"
    return _error(
        frame,
        f"the forward saved {len(frame.slots)} activations, the replay {saved}.",
        f"The forward went on to save {_meta(slot)} by\n    {then.op}\n    {then}",
        _BRANCH,
    )


def drifted(frame: "Frame", drifts: "list[Drift]") -> CheckpointError:
    """Shapes agree, contents do not."""
    first = drifts[0]
    then = sites.look_up(frame.sites[first.position])
    return _error(
        frame,
        f"{len(drifts)} of {len(frame.slots)} activations have other values than in forward.",
        f"The first is activation {first.position + 1}, {first.what}: {first.how_much}.\n"
        f"It is saved by\n    {then.op}\n    {then}",
        "a nondeterministic op (atomics, `index_add`, some convolutions), a random generator that "
        "the region does not get as an argument, or a value outside the region that changed: a "
        "parameter updated between forward and backward, a global, an attribute",
    )


def changed_in_place(frame: "Frame", position: int, x: Tensor, version: int) -> CheckpointError:
    """An op of the region wrote to a tensor that another op had saved for its backward."""
    then = sites.look_up(frame.sites[position])
    return _error(
        frame,
        "a tensor needed for backward was modified by an inplace operation.",
        f"{describe(x)} saved by\n    {then.op}\n    {then}\n"
        f"is at version {x._version}; expected version {version}.",
        "an in-place op on a tensor that an earlier op of the region saved; plain autograd refuses "
        "it too",
        "the out-of-place form of that op.",
    )


_BRANCH = (
    "the region took another path: a global or an attribute that decides a branch changed between "
    "forward and backward (a step counter, `requires_grad`, a cache that was filled)"
)
_TRY = "make the region depend on its arguments alone"
_TRY_DEBUG = "; `debug=True` shows the ops where forward and replay part"


def _error(
    frame: "Frame", headline: str, detail: str, cause: str, cure: str | None = None
) -> CheckpointError:
    if not frame.options.preserve_rng_state:
        cause += ", or a random number: this region was called with preserve_rng_state=False"
    parts = [f"Region {region_name(frame.function)} did not replay as it ran: {headline}", detail]
    if frame.trace is not None:
        parts.append(format_diff(frame.trace))
    parts.append(f"Likely cause: {cause}.")
    parts.append(f"Try: {cure or _TRY + ('.' if frame.trace is not None else _TRY_DEBUG + '.')}")
    return CheckpointError("\n".join(parts))


def _cause_of_difference(
    slot: "Slot", found: Tensor | None, then: sites.Site, now: sites.Site | None
) -> str:
    if found is None or then != now:
        return _BRANCH
    if slot.meta[2] != found.device:
        return "a device that the region takes from outside: a global, a module that was moved"
    if slot.meta[1] != found.dtype:
        return (
            "a dtype from outside: autocast switched inside the region by a global, a module cast"
        )
    return (
        "a shape that depends on data (routing, masks, `nonzero`), and the data came out otherwise "
        "(a nondeterministic op, a random generator of your own), or a parameter or buffer resized "
        "since"
    )


def _meta(slot: "Slot") -> str:
    shape, dtype, device = slot.meta
    return meta(dtype, shape, device)


def _side_by_side(*rows: tuple[str, str, str]) -> str:
    table = [("", "forward", "replay"), *rows]
    label, left = (max(len(row[i]) for row in table) for i in (0, 1))
    return "\n".join(f"    {a.ljust(label)}  {b.ljust(left)}   {c}".rstrip() for a, b, c in table)
