"""Objects that regions write to are in replay what they were before the forward."""

import collections
import dataclasses
import gc
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import policies
from tests.regions.recompute.state_caches import (
    Cache,
    Holder,
    Run,
    layer,
    plainly,
    region,
    region_of,
    run,
)
from tests.toys import gradients, leaf, same_bits


@dataclasses.dataclass(frozen=True)
class FrozenHolder:
    cache: Any


@dataclasses.dataclass(slots=True)
class SlotsHolder:
    cache: Any


class Named(NamedTuple):
    cache: Any


class OwnDict(dict[str, Any]):
    pass


class OwnList(list[Any]):
    pass


WAYS: dict[str, Callable[[Cache], Any]] = {
    "itself": lambda cache: cache,
    "list": lambda cache: [cache],
    "tuple": lambda cache: ((cache,),),
    "dict": lambda cache: {"cache": cache},
    "dataclass": Holder,
    "frozen dataclass": FrozenHolder,
    "slots": SlotsHolder,
    "named tuple": Named,
    "namespace": lambda cache: types.SimpleNamespace(cache=cache),
    "own dict": lambda cache: OwnDict(cache=cache),
    "own list": lambda cache: OwnList([Holder(cache)]),
    "deque": lambda cache: collections.deque([cache]),
}


def twice(x: Tensor, cache: Any) -> Tensor:
    return region(region(x, cache).sin(), cache)


def pair(x: Tensor, cache: Any) -> Tensor:
    return layer(layer(x, cache).sin(), cache)


REGIONS: dict[str, tuple[Run, Run]] = {
    "positional": (layer, region),
    "keyword": (layer, lambda x, c: rekindle.checkpoint(layer, x, cache=c)),
    "in a partial": (
        layer,
        lambda x, c: rekindle.checkpoint(partial(layer, cache=c), x),
    ),
    "in nested partials": (
        layer,
        lambda x, c: rekindle.checkpoint(partial(partial(lambda c, x: layer(x, c), c)), x),
    ),
    "to its end": (layer, partial(region, early_stop=False)),
    "values": (layer, partial(region, determinism_check="values")),
    "debug": (layer, partial(region, debug=True)),
    "with contexts": (
        layer,
        partial(region, context_fn=lambda: (nullcontext(), nullcontext())),
    ),
    "nested": (pair, lambda x, c: rekindle.checkpoint(twice, x, c)),
    "in a policy": (
        pair,
        lambda x, c: rekindle.checkpoint(twice, x, c, context_fn=policies.keep_matmuls),
    ),
}


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert same_bits(x, y) if isinstance(x, Tensor) else x == y, i


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("plain", "call"), REGIONS.values(), ids=REGIONS)
def test_an_object_that_regions_write_to_ends_a_step_as_without_them(
    plain: Run, call: Run, way: Callable[[Cache], Any]
) -> None:
    x = leaf(3, 4)
    assert_same(run(plain, way, x), run(call, way, x))


@pytest.mark.parametrize(("plain", "call"), REGIONS.values(), ids=REGIONS)
def test_a_second_backward_sees_the_object_as_it_was_too(plain: Run, call: Run) -> None:
    x = leaf(3, 4)
    assert_same(run(plain, Holder, x, backwards=2), run(call, Holder, x, backwards=2))


@pytest.mark.parametrize(("plain", "call"), REGIONS.values(), ids=REGIONS)
def test_an_object_that_regions_write_to_may_be_under_offload(plain: Run, call: Run) -> None:
    x = leaf(3, 4)
    expected = run(plain, Holder, x)
    with rekindle.offload():
        assert_same(expected, run(call, Holder, x))


@pytest.mark.parametrize("call", [call for _, call in REGIONS.values()], ids=REGIONS)
def test_a_cache_that_regions_filled_goes_without_a_backward(call: Run) -> None:
    """It leads to the graph and the graph to the regions, which must not lead back to it."""

    def forward() -> "list[weakref.ref[Any]]":
        cache = Cache()
        call(call(leaf(3, 4), cache), cache)
        return [weakref.ref(value) for value in (cache, cache.states, cache.rows)]

    found = forward()
    gc.collect()  # the cache holds itself
    assert [weak() for weak in found] == [None] * 3


def test_a_reentrant_region_writes_to_an_object_once() -> None:
    x, objects = leaf(3, 4), [Cache(), Cache()]
    grads = []
    for cache, reentrant in zip(objects, (False, True), strict=True):
        # A reentrant region has no gradient for what it puts aside: one region is all there is.
        rekindle.checkpoint(layer, x, [Holder(cache)], use_reentrant=reentrant).sum().backward()
        grads.append(x.grad)
        x.grad = None
    assert_same(objects[0].contents(), objects[1].contents())
    assert same_bits(*grads)


def test_a_reentrant_region_takes_gradients_to_what_an_object_holds() -> None:
    x, w = leaf(3), leaf(3)
    out = rekindle.checkpoint(
        lambda x, h: (x * h.cache).sin(), x, Holder(w * 2), use_reentrant=True
    )
    out.sum().backward()
    ours = w.grad
    w.grad = None
    (x * (w * 2)).sin().sum().backward()
    assert same_bits(ours, w.grad)


def test_a_region_reads_a_list_as_it_was_before_a_later_region_appended_to_it() -> None:
    x = leaf(3)

    def step(checkpoint: Callable[..., Tensor]) -> Any:
        holder = Holder([x.exp()])
        read = checkpoint(lambda x, h: (x * sum(h.cache)).sin(), x, holder)
        return checkpoint(lambda x, h: (h.cache.append(x.cos()), x.sin().sin())[1], read, holder)

    expected = gradients(lambda: step(plainly), [x])
    found = gradients(lambda: step(region_of), [x])
    assert same_bits(expected[1][0], found[1][0])


def test_an_object_that_is_gone_by_the_time_of_backward_is_made_again() -> None:
    x = leaf(3)

    def scaled(x: Tensor, factors: Holder) -> Tensor:
        return (x * factors.cache["by"]).sin().sin()

    rekindle.checkpoint(scaled, x, Holder({"by": torch.full((3,), 2.0)})).sum().backward()
    ours, x.grad = x.grad, None
    (x * 2.0).sin().sin().sum().backward()
    assert same_bits(ours, x.grad)


def test_an_object_that_nobody_wrote_to_is_the_very_object_in_replay() -> None:
    seen, settings = [], Holder({"scale": 2.0})

    def scaled(x: Tensor, settings: Holder) -> Tensor:
        seen.append(settings)
        return (x * settings.cache["scale"]).sin().sin()

    rekindle.checkpoint(scaled, leaf(3), settings).sum().backward()
    assert [found is settings for found in seen] == [True, True]


def test_an_object_that_is_put_back_by_hand_is_not_written_to_in_replay() -> None:
    log = Holder([])

    def logged(x: Tensor, log: Holder) -> Tensor:
        log.cache.append("ran")
        return x.sin().sin()

    out = rekindle.checkpoint(logged, leaf(3), log)
    log.cache.pop()
    out.sum().backward()
    assert log.cache == []


def test_objects_that_hold_each_other_still_do_in_replay() -> None:
    together = []

    class Node:
        def __init__(self) -> None:
            self.other: Any = None
            self.runs = 0

    def region(x: Tensor, node: Node, others: list[Node]) -> Tensor:
        node.runs += 1
        together.append(node.other.other is node and others[0] is node.other)
        return (x * node.runs).sin().sin()

    a, b = Node(), Node()
    a.other, b.other = b, a
    rekindle.checkpoint(region, leaf(3), a, [b]).sum().backward()
    assert together == [True, True]
    assert (a.runs, b.runs) == (1, 0)


def test_a_list_given_beside_the_object_that_holds_it_is_one_list_in_replay() -> None:
    x = leaf(3)

    def region(holder: Holder, tensors: list[Tensor]) -> Tensor:
        tensors.append(tensors[0].exp())
        return holder.cache[0].sin() * holder.cache[1].sin()

    def step(checkpoint: Callable[..., Tensor]) -> Tensor:
        tensors = [x]
        return checkpoint(region, Holder(tensors), tensors)

    expected = gradients(lambda: step(plainly), [x])
    assert same_bits(expected[1][0], gradients(lambda: step(region_of), [x])[1][0])


def test_two_threads_may_replay_regions_of_one_cache() -> None:
    cache, x = Cache(), leaf(3, 4)
    outs = [region(x, cache), region(x, cache)]
    before = cache.contents()
    grads: list[Any] = [None, None]

    def backward(i: int) -> None:
        grads[i] = torch.autograd.grad(outs[i].sum(), x, retain_graph=True)

    threads = [threading.Thread(target=backward, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(grad is not None for grad in grads)
    assert_same(before, cache.contents())
