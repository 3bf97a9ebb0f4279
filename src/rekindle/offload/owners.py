"""Owners of offloaders: of what they learnt of steps, and of the memory they set aside.

| who offloads | owner |
| --- | --- |
| a model with strategies (`rekindle.apply`, plans) | the model: it holds an `OffloaderSet` |
| `with rekindle.offload(...)` | all contexts with equal arguments: `shared_offloader` |
| a policy outside such a model | the process: a policy is a value, and holds nothing |

Two models never share an offloader: their steps would be taken for each other's. A forked process
begins anew, without the threads of its parent.
"""

import os
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn

from rekindle.offload.offloader import Offloader
from rekindle.strategy import Offload
from rekindle.torch_private.dynamo_frames import no_graph_begins


class OffloaderSet:
    """The offloaders of one owner, one for each strategy, made when first needed.

    A copy or a pickle of it is an empty one: a copy of a model learns its own steps.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._found: dict[Any, Offloader] = {}

    def get(self, strategy: Offload, limit_in_flight: bool = True) -> Offloader:
        """Returns the offloader for a strategy."""
        return self.find((strategy, limit_in_flight), strategy, limit_in_flight)

    def find(self, key: Hashable, strategy: Offload, limit_in_flight: bool = True) -> Offloader:
        """Returns the offloader that has this key; the first time it is made for the strategy.

        For callers that have a key which takes less time to hash than a strategy does.
        """
        if self._process != os.getpid():
            self._process = os.getpid()
            self._found = {}
        found = self._found.get(key)
        if found is None:
            found = self._found.setdefault(key, Offloader(strategy, limit_in_flight))
        return found

    def __iter__(self) -> Iterator[Offloader]:
        return iter(list(self._found.values()))

    def trim(self) -> None:
        """Give back the memory, or the disk, that no activation uses."""
        for offloader in self:
            offloader.trim()

    def retain(self, strategies: Container[Offload | None]) -> None:
        """Forget the offloaders of other strategies; those that were found by a key stay."""
        for key, offloader in list(self._found.items()):
            if key == (offloader.strategy, True) and offloader.strategy not in strategies:
                del self._found[key]

    def clear(self) -> None:
        """Forget the offloaders: each is freed when no graph has an activation of it."""
        self._found.clear()

    def __reduce__(self) -> Any:
        return OffloaderSet, ()


_of_models: "WeakKeyDictionary[nn.Module, OffloaderSet]" = WeakKeyDictionary()


def owner_of(model: nn.Module) -> OffloaderSet:
    """Returns the offloaders of a model that is given strategies, now or before."""
    found = _of_models.get(model)
    return _of_models.setdefault(model, OffloaderSet()) if found is None else found


def release(modules: Iterable[nn.Module]) -> None:
    """Have modules own no offloaders any more, and give back the memory that nothing uses."""
    for module in modules:
        found = _of_models.pop(module, None)
        if found is not None:
            found.trim()


process_owner = OffloaderSet()
"""The offloaders of policies outside models with strategies, and of compiled graphs."""
_owner: ContextVar[OffloaderSet] = ContextVar("rekindle_offload_owner", default=process_owner)
current_owner = _owner.get
"""Returns the owner of what runs now: the innermost model with strategies, or the process."""


@no_graph_begins
def run_for_owner(
    owner: OffloaderSet, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a forward whose policies offload for an owner, and return what it returns."""
    before = _owner.get()
    try:
        _owner.set(owner)
        return function(*args, **kwargs)
    finally:  # begins with a call of C, before which nothing can strike
        _owner.set(before)


_MAX_RECENT = 4
"""Number of shared offloaders that live on when no `rekindle.Offload` holds them."""
_shared: WeakValueDictionary[tuple[int, Offload], Offloader] = WeakValueDictionary()
_recent: deque[Offloader] = deque(maxlen=_MAX_RECENT)
_using = Lock()


def shared_offloader(strategy: Offload) -> Offloader:
    """Returns the offloader that all `with rekindle.offload(...)` of a strategy share.

    It is held for a while: a training loop may make a context of equal arguments every step.
    """
    key = os.getpid(), strategy
    offloader = _shared.get(key)
    if offloader is None:
        offloader = _shared.setdefault(key, Offloader(strategy))
    if not _recent or _recent[-1] is not offloader:
        with _using:
            others = [other for other in _recent if other is not offloader]
            _recent.extend((*others, offloader))  # which lets go of as many at the other end
    return offloader


def shared_offloaders() -> list[Offloader]:
    """Returns the offloaders that contexts share now."""
    return list(_shared.values())


def forget_unowned() -> None:
    """Have contexts, and policies outside models, begin with offloaders that learnt nothing."""
    _shared.clear()
    _recent.clear()
    process_owner.clear()
