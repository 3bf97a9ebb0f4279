"""A program with the world it trains: what a way of calling backward works on."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.programs.interpreter import Machine
from tests.programs.modes import Mode
from tests.programs.steps import Program
from tests.programs.world import INPUTS, new_world, set_seed


class Training:
    """A program with its world: what a way of calling backward works on."""

    def __init__(
        self, program: Program, plain: bool, device: torch.device, modes: Mapping[str, Mode]
    ) -> None:
        self.program = program
        self.world = new_world().to(device)
        self.world.requires_grad_(program.learns)
        self.machine = Machine(self.world, device, modes, plain)
        set_seed(12)
        self.generator = torch.Generator(device).manual_seed(5)
        self.inputs = {name: INPUTS[name](device) for name in program.inputs}
        self.leaves = {
            name: leaf
            for name, leaf in (*self.inputs.items(), *self.world.named_parameters())
            if leaf.requires_grad
        }
        self.found: dict[str, Any] = {}
        """Everything to be compared, by name."""

    def forward(self) -> list[Tensor]:
        """Run the program; the variables that the loss sees."""
        env: dict[str, Any] = {**self.inputs, "generator": self.generator}
        self.machine.steps(self.program.body, env)
        for name in (*self.program.seen, *self.program.unseen):
            self.note(f"output {name}", env[name])
            self.note(f"output {name} requires grad", env[name].requires_grad)
        return [env[name] for name in self.program.seen]

    def note(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.found[f"{name} #{len(self.found)}"] = value

    def note_all(self, values: Iterable[tuple[Any, Tensor | None]], kind: str) -> None:
        for name, value in values:
            self.note(f"{kind} {name}", value)


def loss_of(outs: list[Tensor]) -> Tensor:
    """A scalar in which every element of every output has a weight of its own."""
    parts = [
        (
            out.float() * torch.linspace(i + 1, i + 2, out.numel(), device=out.device).view_as(out)
        ).sum()
        for i, out in enumerate(outs)
        if out.requires_grad
    ]
    if not parts:
        raise RuntimeError("no output requires a gradient")
    return torch.stack(parts).sum()
