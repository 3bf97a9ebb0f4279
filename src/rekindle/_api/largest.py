"""`largest`."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rekindle._api.planning import checked_progress
from rekindle._api.planning import profile as profile_step
from rekindle._api.planning_checks import (
    check_model,
    check_options,
    is_meta,
    need_scipy,
    refuse_without_memory,
)
from rekindle.modules.blocks import Named
from rekindle.planner.devices import Device, usable_bytes
from rekindle.planner.fake_profile import table_device
from rekindle.planner.find_largest import LargestRequest, MeasuredSize, find_largest
from rekindle.planner.largest import Largest, Over, Unit
from rekindle.planner.placement import compute_device
from rekindle.planner.plan_for_budget import checked_budget, refuse_unlikely_budget
from rekindle.planner.progress import show_progress
from rekindle.planner.training_step import TrainingStep
from rekindle.report import largest_html, largest_text  # noqa: F401 (it prints by them)


def largest(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    budget: int | str | None = None,
    device: str | Device | None = None,
    like: str | Device | None = None,
    over: Over = "batch",
    multiple_of: int = 1,
    most: int | None = None,
    measure: bool = False,
    loss: Any = None,
    optimizer: Any = None,
    max_offload: int | str | None = None,
    blocks: Named | None = None,
    progress: bool | None = None,
) -> Largest:
    """Find the largest batch or sequence that fits, and the one with the best throughput.

    Sizes are tried on tensors without memory, so that no device is needed, and the model and the
    batches may be on any. The model ends as it was; `rekindle.fit` then applies a plan to it.

    >>> import torch, rekindle
    >>> block = lambda: torch.nn.Sequential(
    ...     torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
    ... )
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(*[block() for _ in range(8)])
    >>> found = rekindle.largest(
    ...     model,
    ...     lambda size: torch.empty(size, 1024, device="meta"),
    ...     budget="2GiB",
    ...     device="RTX 4090",
    ...     multiple_of=1024,
    ...     loss=lambda out: out.square().mean(),
    ... )
    >>> found.size, found.best.size
    (22528, 4096)

    Args:
        model: as for `profile`.
        make_batch: a function of the size, which returns the batch: as for `profile`.
        budget: bytes that a step may peak at, as an `int` or like `"24GiB"`. None: the memory of
            the device, less a twentieth for what torch does not allocate.
        device: the device to plan for: a name such as `"RTX 4090"`, or a described one. None, or
            `"meta"`: as `like` says.
        like: where times come from, if `device` does not say it. None: the device that the model
            is on.
        over: `"batch"` or `"sequence"`: what the size is, in words and for the throughput.
        multiple_of: the sizes that are tried are multiples of it: the largest is exact among these.
        most: the largest size that is tried, such as the positions that a model has.
        measure: whether to measure each size on the device that the model is on; one that it has no
            memory for does not fit.
        loss: as for `profile`; with a batch that has the size.
        optimizer: the optimizer, for the size of its state.
        max_offload: as for `profile`.
        blocks: as for `profile`.
        progress: as for `profile`.
    """
    need_scipy()
    check_model(model)
    check_options(optimizer, spill=False)
    _check(make_batch, over, multiple_of, most)
    on, limit = _device_and_limit(model, budget, device, like, measure)

    def measured(size: int) -> MeasuredSize:
        batch = make_batch(size)
        items, unit = _items(TrainingStep(model, batch).batch_tensors(), size, over)
        try:
            found = profile_step(
                model,
                batch,
                loss=loss,
                optimizer=optimizer,
                device=None if measure else "meta",
                like=on,
                max_offload=max_offload,
                blocks=blocks,
            )
        except torch.OutOfMemoryError:
            return MeasuredSize(None, items, unit)
        return MeasuredSize(found, items, unit)

    with show_progress(checked_progress(progress)):
        return find_largest(measured, LargestRequest(limit, over, multiple_of, most))


def _check(make_batch: Any, over: Any, multiple_of: Any, most: Any) -> None:
    if not callable(make_batch) or isinstance(make_batch, Tensor):
        raise TypeError(
            "make_batch should be a function of the size that returns a batch, such as "
            f"lambda size: torch.zeros(size, 1024), but got {type(make_batch).__name__}"
        )
    if over not in get_args(Over):
        raise ValueError(f'over should be "batch" or "sequence", but got {over!r}')
    for name, number in (("multiple_of", multiple_of), ("most", most)):
        if number is None and name == "most":
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} should be a whole number from 1 on, but got {number!r}")
    if most is not None and most < multiple_of:
        raise ValueError(
            f"most={most} leaves nothing to try: the smallest size is multiple_of={multiple_of}"
        )


def _device_and_limit(
    model: nn.Module, budget: Any, device: Any, like: Any, measure: Any
) -> tuple[Device | None, int]:
    """The device of the table that times come from, None to measure; and the budget in bytes."""
    if measure:
        if device is not None or like is not None:
            raise ValueError("measure=True measures on the model's own device: without device=")
        refuse_without_memory(model)
        on, room = None, _memory_of(compute_device(model))
    else:
        on = table_device(model, _named(device, like))
        room = on.memory_bytes
    if budget is None:
        if not room:
            raise ValueError('budget= says how much memory there is, like "24GiB"')
        return on, usable_bytes(room)
    limit = checked_budget(budget)
    if isinstance(limit, float):
        raise ValueError(
            f"The largest {budget!r} of what? A share is of one step: give bytes, like '24GiB'"
        )
    refuse_unlikely_budget(budget)
    return on, limit


def _named(device: Any, like: Any) -> str | Device | None:
    """The device that is asked for, by either argument."""
    if isinstance(device, torch.device) or device == "meta":
        is_meta(device)
        device = None
    if device is not None and like is not None:
        raise ValueError("device= and like= both name a device: one is enough")
    named = device if device is not None else like
    if named is not None and not isinstance(named, str | Device):
        raise TypeError(
            f"device should be the name of a device or a described one, but got "
            f"{type(named).__name__}"
        )
    return named


def _memory_of(device: torch.device) -> int:
    """The memory of a real device; 0 of a CPU, whose memory is not for the step alone."""
    if device.type != "cuda":
        return 0
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total


def _items(tensors: list[Tensor], size: int, over: Over) -> tuple[int, Unit]:
    """The items of a step: its tokens, where they are known, or else its samples.

    Of a batch whose tensors are all whole numbers, the first with two dimensions has the tokens.
    """
    ids = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
    if ids and not any(tensor.is_floating_point() for tensor in tensors):
        return ids[0].numel(), "tokens"
    if over == "batch":
        return size, "samples"
    samples = next((t.shape[0] for t in tensors if t.dim() > 1 and t.shape[1] == size), 1)
    return samples * size, "tokens"
