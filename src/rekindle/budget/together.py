"""What blocks run alone do not show: how long they take together.

Alone, a block is timed on a device that is kept busy. In a step it follows others, and where the
host is what bounds them, an option that has the host do more takes longer than it did alone. So one
step runs with every block op by op, and what it takes longer than its blocks did is added to them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from rekindle.budget.execute import what_of
from rekindle.budget.values import BlockProfile, Option
from rekindle.modules.application import apply, remove


def told_together(
    model: nn.Module,
    profiles: Sequence[BlockProfile],
    order: Sequence[tuple[str, int]],
    rest_seconds: float,
    seconds_of_a_step: Callable[[], float],
) -> list[BlockProfile]:
    """The blocks, with options that go op by op as slow as a whole step by them is."""
    leanest = [_leanest(block) for block in profiles]
    chosen = {path: leanest[index] for path, index in order}
    count = sum(leanest[index].fate == "select" for _, index in order)
    if not count:
        return list(profiles)
    apply(model, {path: what_of(option) for path, option in chosen.items()})
    try:
        taken = seconds_of_a_step()
    except torch.OutOfMemoryError:  # it holds more than with everything recomputed
        return list(profiles)
    finally:
        remove(model)
    expected = rest_seconds + sum(leanest[index].seconds for _, index in order)
    late = max(taken - expected, 0.0) / count
    return [
        replace(block, options=tuple(_later(option, late) for option in block.options))
        for block in profiles
    ]


def _leanest(block: BlockProfile) -> Option:
    """The option that goes op by op and holds least; else the one that recomputes all."""
    still = [option for option in block.options if not option.bytes_moved]
    selecting = [option for option in still if option.fate == "select"]
    return min(
        selecting or [option for option in still if option.fate == "recompute"],
        key=lambda option: option.bytes_held,
    )


def _later(option: Option, seconds: float) -> Option:
    if option.fate != "select":
        return option
    return replace(
        option,
        forward_seconds=option.forward_seconds + seconds / 2,
        backward_seconds=option.backward_seconds + seconds / 2,
    )
