"""Exit codes of the command, and errors as messages in place of tracebacks."""

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sysconfig import get_paths
from typing import NoReturn

import typer

import rekindle

FAILED, USAGE, NO_PLAN = 1, 2, 3
"""Exit codes; 0 is success, and 2 is typer's own code for wrong options."""


class UsageError(Exception):
    """The command was called in a way that has no answer."""


@contextmanager
def errors_as_messages(debug: bool) -> Iterator[None]:
    """End the process with a message and an exit code if an error comes.

    If `debug`, its traceback is shown, too. Warnings are messages of one line.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except (typer.Exit, typer.Abort):
            raise
        except UsageError as error:
            _end(str(error), USAGE, debug)
        except rekindle.BudgetError as error:
            _end(str(error), NO_PLAN, debug)
        except Exception as error:  # noqa: BLE001 (whatever a user's model raises)
            _end(_describe(error), FAILED, debug)


def _end(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        typer.echo(traceback.format_exc(), err=True, nl=False)
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {message}", err=True)
    raise typer.Exit(code)


def _describe(error: Exception) -> str:
    """The error's own text, the user's line that it comes from, and how to see more."""
    name = type(error).__name__
    text = str(error).strip()
    kind = "" if name in ("ValueError", "TypeError", "ImportError") and text else f"{name}: "
    lines = [f"{kind}{text or 'no message'}", _user_line(error)]
    lines += [*getattr(error, "__notes__", ()), "--debug shows where it was raised"]
    return "\n  ".join(line for line in lines if line)


def _user_line(error: Exception) -> str:
    """The innermost line of an error's traceback that is in no library; empty if there is none."""
    paths = get_paths()
    libraries = [paths["stdlib"], paths["purelib"], paths["platlib"]]
    libraries.append(str(Path(__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*libraries, "<")):
            return f"at {frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    label = typer.style("warning:", fg="yellow", bold=True)
    typer.echo(f"{label} {message}", file=sys.stderr)
