"""Engines that are wrong on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rekindle.modules.forward import Forward
from rekindle.strategy import Recompute


class _Scaled(torch.autograd.Function):
    """A tensor whose gradient is too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.scale, None


@contextmanager
def wrong_recompute(share: float = 0.03) -> Iterator[None]:
    """A recomputed block gives the one before it a gradient that is too large, each by its own."""
    run = Forward.__call__
    known: list[nn.Module] = []

    def wrong(self: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.strategy != Recompute() or not share:
            return run(self, x, *args, **kwargs)
        if self.__self__ not in known:
            known.append(self.__self__)
        scale = 1 + share * (1 + known.index(self.__self__) / 3)
        return run(self, _Scaled.apply(x, scale), *args, **kwargs)  # type: ignore[no-untyped-call]

    Forward.__call__ = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        Forward.__call__ = run  # type: ignore[method-assign]
