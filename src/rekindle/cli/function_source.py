"""A training step that a function of the user's returns: `train:step`, `path/train.py:step`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rekindle.cli.failures import UsageError
from rekindle.cli.steps import Sizes, Step

_PARTS = ("model", "batch", "loss", "optimizer")


class FunctionSource:
    """A function that returns `model, batch`, `model, batch, loss`, or a dict of such.

    `--batch`, `--seq` and `--dtype` are given to its parameters of these names. It is called where
    tensors are made on the device of the command, so that on the meta device it allocates nothing.
    """

    optimizer = None

    def __init__(self, module: str, name: str) -> None:
        self.name = f"{module}:{name}"
        self._function = _function(module, name)

    def step(self, sizes: Sizes, place: str) -> Step:
        given = {name: size for name, size in vars(sizes).items() if size is not None}
        self._check_takes(given)
        try:
            with torch.device(place), redirect_stdout(sys.stderr):
                returned = self._function(**given)
        except Exception as error:
            if place == "meta":
                error.add_note(
                    f"{self.name} is called where tensors are made on the meta device; "
                    "--in-memory calls it on the CPU"
                )
            raise
        return self._parts(returned)

    def batch(self, step: Step, sizes: Sizes, place: str) -> Any:  # noqa: ARG002 (it makes its own)
        return self.step(sizes, place).batch

    def most(self, over: str) -> int | None:  # noqa: ARG002
        return None

    def _check_takes(self, given: Mapping[str, Any]) -> None:
        parameters = inspect.signature(self._function).parameters
        takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        for name in given:
            if name not in parameters and not takes_any:
                takes = ", ".join(parameters) or "no parameters"
                raise UsageError(
                    f"A {name} is given to the parameter {name} of {self.name}, which has "
                    f"{takes}: write it as def {self.name.rpartition(':')[2]}({name}=...)"
                )

    def _parts(self, returned: Any) -> Step:
        if isinstance(returned, tuple | list) and len(returned) in (2, 3):
            parts = dict(zip(_PARTS, returned, strict=False))
        elif isinstance(returned, Mapping):
            parts = dict(returned)
        else:
            parts = {}
        unknown = [str(name) for name in parts if name not in _PARTS]
        if unknown or not {"model", "batch"} <= parts.keys():
            found = f"a dict with {', '.join(unknown)}" if unknown else _describe(returned)
            raise UsageError(
                f"{self.name} should return model, batch, or model, batch, loss, or a dict of "
                f"{', '.join(_PARTS)}; it returned {found}"
            )
        if not isinstance(parts["model"], nn.Module):
            raise UsageError(
                f"{self.name} should return the model first, but it returned "
                f"{_describe(parts['model'])}"
            )
        return Step(**parts)


def _function(module: str, name: str) -> Callable[..., Any]:
    """Import the user's module, with the current folder on the path, and return its function."""
    with redirect_stdout(sys.stderr):
        imported = _from_file(Path(module)) if module.endswith(".py") else _from_path(module)
    try:
        function = attrgetter(name)(imported)
    except AttributeError:
        there = [each for each, value in vars(imported).items() if inspect.isfunction(value)]
        has = f"; it has {', '.join(there)}" if there else ""
        raise UsageError(f"{module} has no function {name}{has}") from None
    if not callable(function):
        raise UsageError(f"{module}:{name} should be a function, but is {_describe(function)}")
    found: Callable[..., Any] = function
    return found


def _from_path(module: str) -> Any:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there, and something that it needs is not
        raise UsageError(
            f"There is no module {module} in {Path.cwd()} or among what is installed"
        ) from None


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"There is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"step_in_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
