"""The ranks of one call of `profile` or `fit`: they exchange values, and raise the same error.

Note [Beside the group's collectives]. A rank that fails may leave the others in a collective of the
model's: an exchange by another collective would be taken for the one they wait for. So ranks
exchange by the key-value store by which the process group was set up. There a rank says that it has
failed at any moment, and each rank that waits looks for that. Ranks that wait in a collective of
the model's hear of it when that ends: the group's time-out, as in training.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from rekindle.errors import RekindleError
from rekindle.planner.ranks.failures import Failure, failure_of
from rekindle.torch_private.process_groups import default_store, part_of_store

_Value = TypeVar("_Value")
_Error = TypeVar("_Error", bound=Exception)
_LONGEST_PAUSE = 0.02
"""Seconds between two looks at the store."""
_TELLING_SECONDS = 60.0
"""How long a rank that fails may take to tell of it: it puts its traceback into words."""
MEETING_SECONDS = 300.0
"""How long a rank waits for the others to make the same call; half of the group's time-out, if that
is less."""


class Ranks:
    """The ranks of a process group during one call that all of them make."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self._rank = dist.get_rank()
        self.members: list[int] = dist.get_process_group_ranks(group)
        """The ranks, as all of the run number them."""
        store = default_store()
        self._seconds = store.timeout.total_seconds()
        """The time-out of the default group."""
        self._calls: Any = part_of_store(f"rekindle/{group.group_name}", store)
        self._store: Any = self._calls
        self._round = 0
        self._raised: BaseException | None = None
        """The error that all ranks raise now, or have raised."""

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that decides, and speaks."""
        return self._rank == self.members[0]

    def meet(self, call: str) -> None:
        """Wait until all ranks make a call of this name; an error if some do not."""
        number = self._calls.add(f"calls/{self._rank}", 1)
        self._store = part_of_store(str(number), self._calls)
        try:
            calls = self.exchange(call, min(MEETING_SECONDS, self._seconds / 2))
        except (
            _MissingError
        ) as missing:  # as if it had not been made, should the others make it later
            self._calls.add(f"calls/{self._rank}", -1)
            self._store.delete_key(self._key(self._rank))
            raise RekindleError(
                f"{call}() is a collective call: all ranks of its group make it, but "
                f"{_told(missing.ranks)} did not within {missing.seconds:.0f} s. For a model that "
                "this rank runs alone, give group= a process group of this rank alone."
            ) from None
        for rank, other in zip(self.members, calls, strict=True):
            if other != call:
                raise RekindleError(
                    f"{call}() is a collective call: all ranks of its group make it, but rank "
                    f"{rank} called {other}()"
                )

    def exchange(self, value: _Value, seconds: float | None = None) -> list[_Value]:
        """The values of all ranks, in the order of the group; the error of one that has failed."""
        self._round += 1
        self._store.set(self._key(self._rank), pickle.dumps(value))
        keys = [self._key(rank) for rank in self.members]
        self._wait_for(keys, self._seconds if seconds is None else seconds)
        values = [pickle.loads(self._store.get(key)) for key in keys]
        if self._round > 1:  # of which every rank has read all, since it is here
            self._store.delete_key(self._key(self._rank, self._round - 1))
        return values

    def decide(self, work: Callable[[], _Value]) -> _Value:
        """What the first rank makes of some work, for all; if it raises an error, all raise it."""
        outcome: tuple[Any, RekindleError | None] = None, None
        if self.is_first:
            try:
                outcome = work(), None
            except RekindleError as error:
                outcome = None, error
        value, failure = self.exchange(outcome)[0]
        if failure is not None:
            raise self.same_on_all(failure)
        decided: _Value = value
        return decided

    def same_on_all(self, error: _Error) -> _Error:
        """An error that every rank raises of its own accord: the others need not be told."""
        self._raised = error
        return error

    def share(self, error: BaseException) -> BaseException:
        """Tell the other ranks of an error on this one; returns the one that all ranks raise.

        That is the first one that is told.
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
                raise _MissingError(late, seconds)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _first_error(self) -> BaseException | None:
        """The error that was told first; None if its rank could not tell it."""
        until = time.monotonic() + min(_TELLING_SECONDS, self._seconds)
        while not self._store.check(["error"]):
            if time.monotonic() > until:
                return None
            time.sleep(_LONGEST_PAUSE)
        failure: Failure = pickle.loads(self._store.get("error"))
        self._raised = failure.error()
        return self._raised


class _MissingError(RekindleError):
    """Ranks did not come to an exchange."""

    def __init__(self, ranks: list[int], seconds: float) -> None:
        super().__init__(f"{_told(ranks)} did not come to an exchange within {seconds:.0f} s")
        self.ranks, self.seconds = ranks, seconds


def _told(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"
