"""Notes on out-of-memory errors: the plan's predicted peak, and by how much it was too low."""

import re

import torch

from rekindle.planner.input_shapes import Shapes, format_shapes
from rekindle.planner.plan import Plan
from rekindle.sizes import format_bytes, parse_bytes


def add_plan_note(
    error: torch.OutOfMemoryError, plan: Plan, device: torch.device, larger: Shapes
) -> None:
    """Add a note on a model's plan to an error, once.

    Args:
        error: raised while the model ran by the plan.
        plan: the plan.
        device: the device that the model computes on.
        larger: the shapes of the model's last call, if it was larger than planned.
    """
    if not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(format_oom_note(plan, bytes_wanted(error, device), larger))


_BEGIN = "rekindle: the plan"
_REQUEST = re.compile(r"Tried to allocate (\d+(?:\.\d+)? [KMGT]?i?B)")


def bytes_wanted(error: torch.OutOfMemoryError, device: torch.device) -> int | None:
    """Return the bytes in use when memory ran out, with the failed request; None off a GPU."""
    if device.type != "cuda":
        return None
    request = _REQUEST.search(str(error))
    asked = parse_bytes(request[1], "the request") if request else 0
    return torch.cuda.memory_allocated(device) + asked


def format_oom_note(plan: Plan, wanted: int | None, larger: Shapes = ()) -> str:
    """Return a note for an out-of-memory error: the plan's peak, the bytes wanted, the cure."""
    shapes = f" for {format_shapes(plan.inputs)}" if plan.inputs else ""
    text = f"{_BEGIN}{shapes} foresaw a peak of {format_bytes(plan.predicted_peak)}"
    if plan.measured_peak is not None:
        text += f", measured as {format_bytes(plan.measured_peak)} when it was made"
    text += f", within a budget of {format_bytes(plan.budget)}."
    if wanted is not None:
        excess = wanted - plan.predicted_peak
        text += f" When memory ran out, {format_bytes(wanted)} were wanted: "
        if excess > 0:
            text += f"{format_bytes(excess)} more than foreseen."
        else:
            text += "no more than foreseen, so the device has less room than the budget says."
    if larger:
        text += f" The model was called with {format_shapes(larger)}, larger than that."
    return f"{text} Fit again with what is largest, or with a smaller budget."
