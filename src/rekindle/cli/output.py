"""The output of the command: stdout, and files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import rekindle
from rekindle.cli.answers import Answer
from rekindle.cli.failures import UsageError
from rekindle.cli.steps import Step


@dataclass(frozen=True)
class Output:
    """Where an answer goes: to stdout as text or as JSON, and into files."""

    as_json: bool = False
    save: Path | None = None
    html: Path | None = None
    snapshot: Path | None = None

    def check(self) -> None:
        """Refuse files that cannot be written, before the work."""
        if self.snapshot is not None and self.html is None:
            raise UsageError("--snapshot is written beside a page: --html names it")
        for path in (self.save, self.html, self.snapshot):
            if path is not None and not path.parent.is_dir():
                raise UsageError(f"There is no folder {path.parent} to write {path.name} into")

    def write(self, step: Step, answer: Answer) -> None:
        """Print the answer, and write what is asked for."""
        if self.as_json:
            typer.echo(json.dumps(answer.as_json(), indent=1))
        else:
            typer.echo(f"{describe_step(step)}\n{answer}")
        if self.save is not None:
            answer.save(self.save)
            _wrote(self.save)
        if self.html is not None:
            value: Any = answer.plan if isinstance(answer, rekindle.Largest) else answer
            more = {} if self.snapshot is None else {"snapshot": self.snapshot}
            value.report(self.html, **more)
            _wrote(self.html)
        if self.snapshot is not None:
            _wrote(self.snapshot)


def describe_step(step: Step) -> str:
    """One line about the step that is planned: the model, its size, and the optimizer."""
    parameters = list(step.model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    dtype = str(parameters[0].dtype).removeprefix("torch.")
    optimizer = "no optimizer" if step.optimizer is None else type(step.optimizer).__name__
    return f"{type(step.model).__name__}: {_count(count)} parameters in {dtype}, {optimizer}"


def _count(number: float) -> str:
    """A number for people: `70.6 billion`."""
    for word in ("", " thousand", " million"):
        if number < 1000:
            return f"{number:.3g}{word}"
        number /= 1000
    return f"{number:.1f} billion"


def _wrote(path: Path) -> None:
    typer.echo(f"wrote {path}", err=True)
