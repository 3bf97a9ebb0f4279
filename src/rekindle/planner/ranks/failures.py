"""An error on one rank as a value, from which the other ranks raise the same error."""

import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import RekindleError

_ON_RANK = "On rank"


@dataclass(frozen=True)
class Failure:
    """The parts of an error. Its class is not called: it may take other arguments."""

    kind: type[Exception]
    args: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)
    """Its attributes and notes."""

    def error(self) -> Exception:
        """Make the error again."""
        error = self.kind.__new__(self.kind, *self.args)
        error.args = self.args
        vars(error).update(self.state)
        return error


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return an error for other ranks, and name this rank in the error itself.

    The failure has the error's class and text if these can be pickled. The rank's traceback is a
    note of it.

    >>> failure_of(ValueError("too large"), 3).error()
    ValueError('On rank 3: too large')
    """
    traced = "".join(traceback.format_exception(error)).rstrip()
    _name_rank(error, rank)
    note = f"The traceback on rank {rank}:\n{traced}"
    if isinstance(error, Exception):
        state = {name: value for name, value in vars(error).items() if _is_picklable(value)}
        state["__notes__"] = [*getattr(error, "__notes__", ()), note]
        failure = Failure(type(error), error.args, state)
        if _survives_pickle(failure, str(error)):
            return failure
    text = str(error) if str(error).startswith(_ON_RANK) else f"{_ON_RANK} {rank}: {error}"
    return Failure(RekindleError, (f"{text} ({type(error).__name__})",), {"__notes__": [note]})


def _name_rank(error: BaseException, rank: int) -> None:
    """Name the rank in an error: in its text, or else in a note."""
    name = f"{_ON_RANK} {rank}: "
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (name + error.args[0],)
    if name not in str(error):  # it makes its text of something else
        error.add_note(f"{name}{error}")


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - the methods of its class may raise anything
        return False
    return True


def _survives_pickle(failure: Failure, text: str) -> bool:
    """Return whether a failure goes through pickle, and an error with the text comes out."""
    try:
        return str(pickle.loads(pickle.dumps(failure)).error()) == text
    except Exception:  # noqa: BLE001 - the methods of its class may raise anything
        return False
