"""Caches and other objects that regions write to."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rekindle


class Cache:
    """Grows by attributes, a list, a dict, a set and tensors that it writes to in place."""

    def __init__(self) -> None:
        self.length = 0
        self.states: Tensor | None = None
        self.log: list[Tensor] = []
        self.by_name: dict[str, Any] = {}
        self.seen: set[int] = set()
        self.counter = torch.zeros((), dtype=torch.long)
        self.rows = torch.zeros(8, 4)
        self.owner = self

    def update(self, x: Tensor) -> Tensor:
        assert self.owner is self
        self.rows[self.length].copy_(x.sum(0))
        self.length += 1
        self.seen.add(self.length)
        self.counter.add_(1)
        self.log.append(x.exp())
        self.by_name[f"state {self.length}"] = {"x": x.cos()}
        self.states = x if self.states is None else torch.cat([self.states, x])
        found = self.states.sum(0) + sum(x.sum() for x in self.log) * len(self.seen)
        found = found + self.rows.clone().tanh().sum(0) * int(self.counter)
        return found + sum(entry["x"].sum() for entry in self.by_name.values())

    def contents(self) -> list[Any]:
        tensors = [self.states, *self.log, *(entry["x"] for entry in self.by_name.values())]
        plain = [self.length, list(self.by_name), sorted(self.seen), int(self.counter)]
        return [*plain, self.rows.detach().clone(), *tensors]


def layer(x: Tensor, cache: Any) -> Tensor:
    """Some ops that save, on what the cache gives back."""
    return (x.sin() * find(cache).update(x.sin())).tanh().sin()


def plainly(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


region_of: Callable[..., Tensor] = rekindle.checkpoint


def find(cache: Any) -> Cache:
    """The cache in whatever it is given in."""
    while not isinstance(cache, Cache):
        if isinstance(cache, dict):
            cache = cache["cache"]
        elif isinstance(cache, list | tuple | collections.deque):
            cache = cache[0]
        else:
            cache = cache.cache
    return cache


@dataclasses.dataclass
class Holder:
    cache: Any


Run = Callable[[Tensor, Any], Tensor]


def region(x: Tensor, cache: Any, **options: Any) -> Tensor:
    return rekindle.checkpoint(layer, x, cache, **options)  # type: ignore[no-any-return]


def run(call: Run, way: Callable[[Cache], Any], x: Tensor, backwards: int = 1) -> list[Any]:
    """Two layers that share a cache, and a loss on it too: gradients, and what the cache holds."""
    cache = Cache()
    out = call(call(x, way(cache)), way(cache))
    assert cache.states is not None
    loss = out.sum() + cache.states.sum() * 0.1
    for _ in range(backwards - 1):
        loss.backward(retain_graph=True)
    loss.backward()
    grad, x.grad = x.grad, None
    return [grad, *cache.contents()]
