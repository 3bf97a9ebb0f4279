"""Ranks of a distributed run agree: on budgets, profiles and plans, and on errors.

Ranks that plan together run the same steps, so that collectives of the model's find their partners,
and end with one plan. Where there are no other ranks, all of this is next to nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from rekindle.planner.ranks.rank_calls import Ranks
from rekindle.torch_private.dispatch_modes import FAKE, entered_mode
from rekindle.torch_private.process_groups import in_process_group

_Value = TypeVar("_Value")
_Error = TypeVar("_Error", bound=Exception)
_current: ContextVar[Ranks | None] = ContextVar("rekindle_ranks", default=None)
"""The ranks of the call that runs; None without other ranks."""
_inside: ContextVar[bool] = ContextVar("rekindle_inside_a_collective_call", default=False)


@contextmanager
def collective(call: str, group: Any = None) -> Iterator[None]:
    """Around a call that all ranks of a group make: if one raises an error, all raise it.

    Inside another such call it is a part of that. Waits for the other ranks at its begin and at its
    end; no rank goes on if another one cannot.
    """
    if _inside.get():
        yield
        return
    ranks = _ranks_of(group)
    tokens = _inside.set(True), _current.set(ranks)
    try:
        if ranks is None:
            yield
            return
        ranks.meet(call)
        try:
            yield
            ranks.exchange(None)
        except BaseException as error:
            shared = ranks.share(error)
            if shared is error:
                raise
            raise shared from error
    finally:
        _current.reset(tokens[1])
        _inside.reset(tokens[0])


def _ranks_of(group: Any) -> Ranks | None:
    """The ranks of a process group, or of a mesh with one dimension; None if there is but one."""
    if not in_process_group():
        if group is not None:
            raise ValueError("group= is for a distributed run, but there is no process group")
        return None
    if hasattr(group, "get_group"):  # a mesh
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group should be a process group of this rank's, but got {type(group).__name__}"
        )
    has_others = dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"
    return Ranks(group) if has_others else None


def everyone(value: _Value) -> list[_Value]:
    """The values of all ranks, in their order; this one's alone, without other ranks."""
    ranks = _others()
    return [value] if ranks is None else ranks.exchange(value)


def wait_for_all() -> None:
    """Go on when all ranks are here; if one has failed on its way, raise its error."""
    everyone(None)


def decided(work: Callable[[], _Value]) -> _Value:
    """Do some work on the first rank alone, and return its result, or raise its error, on all."""
    ranks = _others()
    return work() if ranks is None else ranks.decide(work)


def first_told(text: str | None) -> str | None:
    """Return the text of the first rank that has one, with the rank's name; None if none has."""
    found = everyone(text)
    rank = next((rank for rank, told in enumerate(found) if told is not None), None)
    if rank is None:
        return None
    ranks = _others()
    return found[rank] if ranks is None else f"On rank {ranks.members[rank]}: {found[rank]}"


def same_on_all(error: _Error) -> _Error:
    """An error that every rank raises here, and that is the same on each: nobody has to be told."""
    ranks = _others()
    return error if ranks is None else ranks.same_on_all(error)


def refuse_different(**options: Any) -> None:
    """Refuse options of a call that differ between ranks."""
    given: list[Mapping[str, Any]] = everyone(options)
    ranks = _others()
    members = [0] if ranks is None else ranks.members
    for name, first in given[0].items():
        for rank, other in zip(members, given, strict=True):
            if other[name] != first:
                found = f"rank {members[0]} has {first!r}, rank {rank} has {other[name]!r}"
                raise same_on_all(ValueError(f"Ranks of one group differ in {name}: {found}"))


def is_first() -> bool:
    """Return whether this rank is the one that decides, and writes to the log."""
    ranks = _others()
    return ranks is None or ranks.is_first


def has_others() -> bool:
    """Return whether other ranks plan together with this one, or, outside a call, exist at all."""
    if entered_mode(FAKE) is not None:  # where nothing is measured, all find the same
        return False
    if _inside.get():
        return _current.get() is not None
    return in_process_group() and dist.get_world_size() > 1


def _others() -> Ranks | None:
    """The ranks that plan together, if there are several."""
    return _current.get() if entered_mode(FAKE) is None else None
