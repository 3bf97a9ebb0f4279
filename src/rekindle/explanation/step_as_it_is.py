"""An account of a step as its model is now: with the strategies that are applied to it.

It runs on fake tensors, so the same code gives the same bytes on any machine.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from rekindle.explanation.record import record_step
from rekindle.explanation.saved import saved_activations
from rekindle.explanation.static_shares import kinds_of, static_shares
from rekindle.explanation.summarize import format_moment, shares, timeline, walk
from rekindle.explanation.types import Explanation
from rekindle.modules.apply_strategies import apply_strategies, undo
from rekindle.modules.unwrapping import class_name, places
from rekindle.planner.devices import Device, OpClock
from rekindle.planner.loss import Loss
from rekindle.planner.measure.preserve_model_state import repeatable
from rekindle.planner.measure.static_memory import optimizer_bytes, static_bytes
from rekindle.planner.trace.fake_tensors import CPU, refuse_what_has_no_fake, with_fake_tensors
from rekindle.planner.training_step import TrainingStep
from rekindle.strategy import Strategy


def step_as_it_is(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: Any,
    device: Device,
    strategies: Mapping[str, Strategy] | None = None,
) -> Explanation:
    """Return an account of a step as on a device, without changes; the model ends as it was.

    `strategies` by path stand for those that are applied. What they offload counts as kept: on fake
    tensors no copy takes time.
    """
    refuse_what_has_no_fake(model)
    with (
        with_fake_tensors(model, batch, as_on=device.name) as given,
        OpClock(device) as clock,
    ):
        step = TrainingStep(model, given, loss)
        tensors, state = step.batch_tensors(), optimizer_bytes(optimizer)
        total = static_bytes(model, state, CPU, tensors)
        static = static_shares(model, CPU, tensors, state, total)
        with repeatable(step):
            if strategies is not None:
                undo(model)
                apply_strategies(model, strategies)
            begin = clock.mark()
            record = record_step(step, CPU, lambda: clock.seconds(begin, clock.mark()))
            seconds = clock.seconds(begin, clock.mark())
    found, kinds = walk(record), kinds_of(static.items())
    classes = {path: class_name(model.get_submodule(at)) for path, at in places(model).items()}
    summed = shares(record, found, static, classes)
    return Explanation(
        model=class_name(model),
        device=device.name,
        batch=TrainingStep(model, batch).describe_batch(),
        loss=step.loss_source,
        source="fake tensors",
        peak=total + found.peak,
        peak_at=format_moment(record, found.peak_event, class_name(model)),
        static_bytes=total,
        device_bytes=None if device.name == "cpu" else device.memory_bytes,
        seconds=seconds,
        kinds=summed.kinds,
        modules=summed.modules,
        ops=summed.ops,
        lines=summed.lines,
        timeline=timeline(record, found, kinds),
        saved=saved_activations(record, found.at_peak),
        changes=(),
        others=(),
        unhelpful=(),
    )
