"""The answers of the command, by rekindle's public functions."""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

import rekindle
from rekindle.cli.failures import UsageError
from rekindle.cli.sources import optimizer_named
from rekindle.cli.steps import Sizes, Source, Step, with_optimizer
from rekindle.planner.plan_for_budget import refuse_unlikely_budget

Answer: TypeAlias = rekindle.Explanation | rekindle.Plan | rekindle.Frontier | rekindle.Largest


@dataclass(frozen=True)
class Asked:
    """A training step as the command line asks for it, and the device that it would run on."""

    source: Source
    sizes: Sizes
    optimizer: str | None
    device: str
    like: str | None
    in_memory: bool
    blocks: tuple[str, ...]

    @property
    def is_meta(self) -> bool:
        """True if the step is to run without memory."""
        return self.device == "meta"

    @property
    def place(self) -> str:
        """The device that the model and the batch are made on."""
        return "cpu" if self.is_meta and self.in_memory else self.device

    def table_device(self) -> rekindle.Device | None:
        """The device that times and sizes are those of; None to measure on the step's own."""
        if not self.is_meta:
            if self.like is not None:
                raise UsageError("--like goes with --device meta: elsewhere, times are measured")
            _refuse_absent(self.device)
            return None
        if self.like is None:
            raise UsageError(
                'Which device is the step for? --like "RTX 4090" plans for one that need not be '
                "there (rekindle devices lists them); --device cuda measures on this machine's"
            )
        try:
            return rekindle.Device.named(self.like)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def step(self) -> Step:
        """Make the step."""
        name = self.optimizer or self.source.optimizer
        kind = None if name is None else optimizer_named(name)
        made = self.source.step(self.sizes, self.place)
        return made if name is None else with_optimizer(made, kind)

    def options(self, step: Step, like: rekindle.Device | None) -> dict[str, Any]:
        """The arguments that `profile`, `explain` and `fit` have in common, but for the batch's."""
        options: dict[str, Any] = {"loss": step.loss, "optimizer": step.optimizer}
        if self.blocks:
            options["blocks"] = self.blocks
        return options | ({"device": "meta", "like": like} if self.is_meta else {})


@dataclass(frozen=True)
class Allowed:
    """The means that plans may use."""

    spill: bool
    max_offload: str | None
    inexact: bool

    def options(self, asked: Asked) -> dict[str, Any]:
        """The arguments of `profile` and `fit`; refuses `--spill` where no disk is measured."""
        if self.spill and asked.is_meta:
            raise UsageError("--spill measures a disk: it goes with --device cuda or cpu")
        return {
            "spill": self.spill,
            "max_offload": self.max_offload,
            "exact": not self.inexact,
        }


def _refuse_absent(device: str) -> None:
    """Refuse a device that is none, or that this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UsageError(
            f"--device {device}: this machine has none ({str(error).splitlines()[0]}); "
            '--like "RTX 4090" plans for a device that is not there'
        ) from None


def explained(asked: Asked) -> tuple[Step, rekindle.Explanation]:
    """Return where the step's memory goes."""
    like = asked.table_device()
    step = asked.step()
    return step, rekindle.explain(step.model, step.batch, **asked.options(step, like))


def planned(asked: Asked, budget: str | None, allowed: Allowed) -> tuple[Step, rekindle.Plan]:
    """Return the plan for a budget; on a real device, verified there."""
    like = asked.table_device()
    means = allowed.options(asked)
    limit = _budget(budget) or _room(asked, like)
    step = asked.step()
    options = asked.options(step, like) | means
    if like is None:
        return step, rekindle.fit(step.model, step.batch, limit, **options)
    profile = rekindle.profile(step.model, step.batch, **options)
    return step, rekindle.solve(profile, limit)


def frontier_of(asked: Asked, points: int, allowed: Allowed) -> tuple[Step, rekindle.Frontier]:
    """Return plans from the plain peak down to the smallest that works."""
    like = asked.table_device()
    means = allowed.options(asked)
    step = asked.step()
    options = asked.options(step, like) | means
    profile = rekindle.profile(step.model, step.batch, **options)
    return step, rekindle.frontier(profile, points)


def largest_of(
    asked: Asked,
    over: Literal["batch", "sequence"],
    budget: str | None,
    multiple_of: int,
    most: int | None,
    max_offload: str | None,
) -> tuple[Step, rekindle.Largest]:
    """Return the largest batch or sequence that fits."""
    like = asked.table_device()
    limit = _budget(budget) or _room(asked, like)
    smallest = _resized(asked.sizes, over, multiple_of)
    step = replace(asked, sizes=smallest).step()

    def make_batch(size: int) -> Any:
        return asked.source.batch(step, _resized(asked.sizes, over, size), asked.place)

    options = asked.options(step, like)
    options.pop("device", None)
    return step, rekindle.largest(
        step.model,
        make_batch,
        budget=limit,
        over=over,
        multiple_of=multiple_of,
        most=most or asked.source.most(over),
        measure=like is None,
        max_offload=max_offload,
        **options,
    )


def _resized(sizes: Sizes, over: Literal["batch", "sequence"], size: int) -> Sizes:
    return replace(sizes, batch=size) if over == "batch" else replace(sizes, seq=size)


def _budget(text: str | None) -> int | str | None:
    """Check a budget before the step is made, which takes a while."""
    if text is None:
        return None
    given = int(text) if text.isdigit() else text
    try:
        refuse_unlikely_budget(given)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from None
    return given


def _room(asked: Asked, like: rekindle.Device | None) -> int:
    """The budget that the device's memory has room for."""
    if like is not None:
        return like.usable_bytes
    if not asked.device.startswith("cuda"):
        raise UsageError("--budget says how much memory the step may take, such as 24GiB")
    return int(torch.cuda.get_device_properties(asked.device).total_memory * 0.95)
