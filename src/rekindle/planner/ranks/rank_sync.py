"""Functions by which the ranks of a distributed run agree on budgets, profiles, plans and errors.

Ranks that plan together run the same steps, so that collectives of the model's find their partners,
and end with one plan. Without other ranks, each of these functions costs next to nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from rekindle.planner.ranks.rank_group import RankGroup
from rekindle.torch_private.dispatch_modes import FAKE, entered_mode
from rekindle.torch_private.process_groups import in_process_group

_Value = TypeVar("_Value")
_Error = TypeVar("_Error", bound=Exception)
_current: ContextVar[RankGroup | None] = ContextVar("rekindle_ranks", default=None)
"""The ranks of the collective call that runs; None without other ranks."""
_inside: ContextVar[bool] = ContextVar("rekindle_inside_a_collective_call", default=False)


@contextmanager
def collective(call: str, group: Any = None) -> Iterator[None]:
    """Run a call that all ranks of a group make: an error on one of them is raised on all.

    A call inside another one is a part of that. Ranks wait for each other at the begin and at the
    end: no rank goes on if another one cannot.
    """
    if _inside.get():
        yield
        return
    ranks = _rank_group(group)
    tokens = _inside.set(True), _current.set(ranks)
    try:
        if ranks is None:
            yield
            return
        ranks.meet(call)
        try:
            yield
            ranks.all_gather(None)
        except BaseException as error:
            shared = ranks.share(error)
            if shared is error:
                raise
            raise shared from error
    finally:
        _current.reset(tokens[1])
        _inside.reset(tokens[0])


def _rank_group(group: Any) -> RankGroup | None:
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
    return RankGroup(group) if has_others else None


def all_gather(value: _Value) -> list[_Value]:
    """Return the values of all ranks, in their order; this one's alone, without other ranks."""
    ranks = _planning_ranks()
    return [value] if ranks is None else ranks.all_gather(value)


def wait_for_all_ranks() -> None:
    """Return when all ranks are here; if one has failed on its way, raise its error."""
    all_gather(None)


def on_first_rank(work: Callable[[], _Value]) -> _Value:
    """Do some work on the first rank alone, and return its result, or raise its error, on all."""
    ranks = _planning_ranks()
    return work() if ranks is None else ranks.on_first_rank(work)


def first_message(text: str | None) -> str | None:
    """Return the text of the first rank that has one, with the rank's name; None if none has."""
    texts = all_gather(text)
    rank = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if rank is None:
        return None
    ranks = _planning_ranks()
    return texts[rank] if ranks is None else f"On rank {ranks.members[rank]}: {texts[rank]}"


def raised_on_all_ranks(error: _Error) -> _Error:
    """Return an error that every rank raises here, alike, so that it need not be shared."""
    ranks = _planning_ranks()
    return error if ranks is None else ranks.raised_on_all_ranks(error)


def require_same_on_ranks(**options: Any) -> None:
    """Raise a `ValueError` if options of a call differ between ranks."""
    given: list[Mapping[str, Any]] = all_gather(options)
    ranks = _planning_ranks()
    members = [0] if ranks is None else ranks.members
    for name, first in given[0].items():
        for rank, other in zip(members, given, strict=True):
            if other[name] != first:
                found = f"rank {members[0]} has {first!r}, rank {rank} has {other[name]!r}"
                raise raised_on_all_ranks(
                    ValueError(f"Ranks of one group differ in {name}: {found}")
                )


def is_first_rank() -> bool:
    """Return whether this rank makes the decisions, and writes to the log."""
    ranks = _planning_ranks()
    return ranks is None or ranks.is_first


def has_other_ranks() -> bool:
    """Return whether other ranks plan together with this one, or, outside a call, exist at all."""
    if entered_mode(FAKE) is not None:  # fake tensors give the same profile on all ranks
        return False
    if _inside.get():
        return _current.get() is not None
    return in_process_group() and dist.get_world_size() > 1


def _planning_ranks() -> RankGroup | None:
    """The ranks that plan together, if there are several."""
    return _current.get() if entered_mode(FAKE) is None else None
