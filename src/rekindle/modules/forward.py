"""What stands in the place of a module's `forward` while it has a fate.

It sits in the module's own `__dict__`, where `nn.Module` looks first: class, names, keys and hooks
are as before, and hooks run around it, once. A copy or a pickle of the module has one of its own.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from rekindle.checkpoint import checkpoint
from rekindle.offload.context import Offload
from rekindle.policies import Policy

Way = Policy | Offload | None
"""How a module runs: under a policy, offloaded, or recomputed as a whole (None)."""

_OPTIONS = frozenset(inspect.signature(checkpoint).parameters)


class Forward:
    """A module's forward, run as a region or offloaded."""

    def __init__(self, module: nn.Module, way: Way, own: Callable[..., Any] | None = None) -> None:
        self.__self__ = module
        self.way = way
        self.own = own
        """What the module itself had in place of its class's forward."""

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward as it was."""
        if self.own is not None:
            return self.own
        forward: Callable[..., Any] = type(self.__self__).forward.__get__(self.__self__)
        return forward

    @property
    def __func__(self) -> Any:
        return getattr(self.__wrapped__, "__func__", self.__wrapped__)

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        way = self.way
        if isinstance(way, Offload):
            with way:
                return forward(*args, **kwargs)
        if kwargs.keys() & _OPTIONS:  # the module's own, not ours
            forward, kwargs = partial(forward, **kwargs), {}
        if way is None:
            return checkpoint(forward, *args, **kwargs)
        return checkpoint(forward, *args, context_fn=way, **kwargs)

    def __reduce__(self) -> Any:
        return Forward, (self.__self__, self.way, self.own)


def forward_of(module: nn.Module) -> Forward | None:
    """What stands in the place of a module's forward, if anything of ours does."""
    found = vars(module).get("forward")
    return found if isinstance(found, Forward) and found.__self__ is module else None


def put(module: nn.Module, way: Way) -> None:
    """Put it there."""
    vars(module)["forward"] = Forward(module, way, vars(module).get("forward"))


def take_away(module: nn.Module) -> None:
    """Put back what was there."""
    forward = forward_of(module)
    if forward is None:
        return
    if forward.own is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward.own
