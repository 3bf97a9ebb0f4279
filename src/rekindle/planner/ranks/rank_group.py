"""The ranks of one call of `profile` or `fit`: they exchange values, and raise the same error.

Note [Beside the group's collectives]. A rank that fails may leave the others in a collective of the
model's: an exchange by another collective would be taken for the one they wait for. So ranks
exchange by the key-value store by which the process group was set up. A rank can write its error
there at any moment, and each rank that waits looks for one. Ranks that wait in a collective of the
model's see the error when that ends: after the group's time-out, as in training.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from rekindle.errors import RekindleError
from rekindle.planner.ranks.failures import Failure, failure_of
from rekindle.torch_private.process_groups import default_store, prefixed_store

_Value = TypeVar("_Value")
_Error = TypeVar("_Error", bound=Exception)
_LONGEST_PAUSE = 0.02
"""Seconds between two looks at the store."""
_ERROR_SECONDS = 60.0
"""Seconds that a rank may take to write its error, which includes formatting its traceback."""
MEETING_SECONDS = 300.0
"""Seconds that a rank waits for the others to make the same call; half of the group's time-out, if
that is less."""


class RankGroup:
    """The ranks of a process group during one call that all of them make."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self._rank = dist.get_rank()
        self.members: list[int] = dist.get_process_group_ranks(group)
        """The ranks, as numbered in the whole run."""
        store = default_store()
        self._seconds = store.timeout.total_seconds()
        """The time-out of the default group."""
        self._calls: Any = prefixed_store(f"rekindle/{group.group_name}", store)
        self._store: Any = self._calls
        self._round = 0
        self._raised: BaseException | None = None
        """The error that all ranks raise now, or have raised."""

    @property
    def is_first(self) -> bool:
        """True on the rank that makes decisions for all, and that writes to the log."""
        return self._rank == self.members[0]

    def meet(self, call: str) -> None:
        """Wait until all ranks make a call of this name; an error if some do not."""
        number = self._calls.add(f"calls/{self._rank}", 1)
        self._store = prefixed_store(str(number), self._calls)
        try:
            calls = self.all_gather(call, min(MEETING_SECONDS, self._seconds / 2))
        except _MissingRanksError as missing:
            # As if the call had not been made, should the others make it later.
            self._calls.add(f"calls/{self._rank}", -1)
            self._store.delete_key(self._key(self._rank))
            raise RekindleError(
                f"{call}() is a collective call: all ranks of its group make it, but "
                f"{_format_ranks(missing.ranks)} did not within {missing.seconds:.0f} s. For a "
                "model that this rank runs alone, give group= a process group of this rank alone."
            ) from None
        for rank, other in zip(self.members, calls, strict=True):
            if other != call:
                raise RekindleError(
                    f"{call}() is a collective call: all ranks of its group make it, but rank "
                    f"{rank} called {other}()"
                )

    def all_gather(self, value: _Value, seconds: float | None = None) -> list[_Value]:
        """Return the values of all ranks, in the order of the group.

        Raises the error of a rank that has failed.
        """
        self._round += 1
        self._store.set(self._key(self._rank), pickle.dumps(value))
        keys = [self._key(rank) for rank in self.members]
        self._wait_for(keys, self._seconds if seconds is None else seconds)
        values = [pickle.loads(self._store.get(key)) for key in keys]
        if self._round > 1:  # every rank that is in this round has read all of the last one
            self._store.delete_key(self._key(self._rank, self._round - 1))
        return values

    def on_first_rank(self, work: Callable[[], _Value]) -> _Value:
        """Return the first rank's result of some work on all ranks; its error is raised on all."""
        outcome: tuple[Any, RekindleError | None] = None, None
        if self.is_first:
            try:
                outcome = work(), None
            except RekindleError as error:
                outcome = None, error
        value, failure = self.all_gather(outcome)[0]
        if failure is not None:
            raise self.raised_on_all_ranks(failure)
        result: _Value = value
        return result

    def raised_on_all_ranks(self, error: _Error) -> _Error:
        """Return an error that every rank raises of its own accord, and so need not be shared."""
        self._raised = error
        return error

    def share(self, error: BaseException) -> BaseException:
        """Write this rank's error to the store; returns the error that all ranks raise.

        That is the first one that was written.
        """
        if error is self._raised:
            return error
        if self._store.add("failures", 1) > 1:
            return self._first_error() or error
        failure = failure_of(error, self._rank)
        self._store.set("error", pickle.dumps(failure))
        has_class = failure.kind is type(error)
        self._raised = error if has_class or not isinstance(error, Exception) else failure.error()
        return self._raised

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"{self._round if number is None else number}/{rank}"

    def _wait_for(self, keys: Sequence[str], seconds: float) -> None:
        until, pause = time.monotonic() + seconds, 0.0005
        while not self._store.check(list(keys)):
            if self._store.check(["error"]):
                error = self._first_error()
                assert error is not None, "it is there"
                raise error
            if time.monotonic() > until:
                late = [r for r in self.members if not self._store.check([self._key(r)])]
                raise _MissingRanksError(late, seconds)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _first_error(self) -> BaseException | None:
        """The error that was written first; None if its rank could not write it."""
        until = time.monotonic() + min(_ERROR_SECONDS, self._seconds)
        while not self._store.check(["error"]):
            if time.monotonic() > until:
                return None
            time.sleep(_LONGEST_PAUSE)
        failure: Failure = pickle.loads(self._store.get("error"))
        self._raised = failure.error()
        return self._raised


class _MissingRanksError(RekindleError):
    """Some ranks did not come to an exchange in time."""

    def __init__(self, ranks: list[int], seconds: float) -> None:
        late = _format_ranks(ranks)
        super().__init__(f"{late} did not come to an exchange within {seconds:.0f} s")
        self.ranks, self.seconds = ranks, seconds


def _format_ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"
