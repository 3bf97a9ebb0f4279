"""Objects among a region's arguments that it writes to: seen as they were, and written to once."""

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
from torch import Tensor, nn

import rekindle
from rekindle import policies
from tests.toys import gradients, leaf, same_bits


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
Run = Callable[[Tensor, Any], Tensor]


def twice(x: Tensor, cache: Any) -> Tensor:
    return region(region(x, cache).sin(), cache)


def region(x: Tensor, cache: Any, **options: Any) -> Tensor:
    return rekindle.checkpoint(layer, x, cache, **options)  # type: ignore[no-any-return]


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


# Tensors that are written to in place


class Rows:
    """Large memory of its own, written to in place: too large to be copied every time."""

    def __init__(self, rows: int = 3) -> None:
        self.rows = [torch.zeros(2000) for _ in range(rows)]


def write(x: Tensor, cache: Rows, row: int) -> Tensor:
    cache.rows[row].add_(x.sin())
    return (cache.rows[row].clone() * x).sin().sin()


def write_all(run: Callable[..., Tensor], x: Tensor, cache: Rows) -> Tensor:
    for row in range(len(cache.rows)):
        x = run(write, x, cache, row)
    return x


def test_large_tensors_that_an_object_holds_are_replayed_from_what_they_were() -> None:
    """Also when it is known which of them a region writes to, and the others are not copied."""
    x = leaf(2000)
    for _ in range(6):
        plain, ours = Rows(), Rows()
        expected = gradients(partial(write_all, plainly, x, plain), [x])[1][0]
        assert same_bits(expected, gradients(partial(write_all, region_of, x, ours), [x])[1][0])
        assert all(map(same_bits, plain.rows, ours.rows))


def test_a_tensor_that_a_region_uses_and_a_later_op_changed_is_an_error_with_its_name() -> None:
    cache = Rows()
    x = leaf(2000)
    out = rekindle.checkpoint(lambda x, cache: (x * (cache.rows[1] + 1)).sin(), x, cache)
    cache.rows[1].add_(1)
    with pytest.raises(rekindle.CheckpointError, match=r"cache\.rows\[1\], a tensor .*in place"):
        out.sum().backward()


def test_a_tensor_that_a_region_has_no_use_for_may_change_in_place_after_it() -> None:
    cache = Rows()
    x = leaf(2000)
    out = rekindle.checkpoint(lambda x, cache: (x * (cache.rows[0] + 1)).sin(), x, cache)
    cache.rows[1].add_(1)
    out.sum().backward()
    assert same_bits(x.grad, x.detach().cos())


def test_memory_that_two_tensors_share_is_an_error_with_its_name_if_it_is_written_to() -> None:
    cache = Rows(1)
    cache.rows.append(cache.rows[0][:500])
    out = rekindle.checkpoint(write, leaf(2000), cache, 0)
    with pytest.raises(rekindle.CheckpointError, match=r"cache\.rows\[0\]"):
        out.sum().backward()


def test_a_tensor_with_gaps_has_the_same_strides_in_replay() -> None:
    cache, strides = Holder(torch.zeros(4, 8)[:, ::2]), []

    def region(x: Tensor, cache: Holder) -> Tensor:
        cache.cache.add_(x)
        strides.append(cache.cache.stride())
        return (x * cache.cache.clone()).sin()

    rekindle.checkpoint(region, leaf(4, 4), cache).sum().backward()
    assert strides == [(8, 2), (8, 2)]


def test_a_tensor_with_a_graph_may_be_written_to_in_place() -> None:
    x = leaf(2000)

    def step(run: Callable[..., Tensor]) -> Tensor:
        cache = Rows(2)
        cache.rows[0] = x * 2
        return write_all(run, x, cache) + cache.rows[0]

    expected = gradients(lambda: step(plainly), [x])
    assert same_bits(expected[1][0], gradients(lambda: step(region_of), [x])[1][0])


# What is not put back


class Closing:
    """Has a `__del__`, which a copy would run once more."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.closed: list[str] = []

    def __del__(self) -> None:
        self.closed.append("closed")


def test_an_object_with_a_del_is_never_copied() -> None:
    closing = Closing()
    closed = closing.closed
    rekindle.checkpoint(lambda x, c: (c.seen.append("x"), x.sin())[1], leaf(3), closing)
    del closing
    assert closed == ["closed"]


def branch(x: Tensor, closing: Closing) -> Tensor:
    closing.seen.append("ran")
    return x.sin().sin() if len(closing.seen) == 1 else x.sin()


def test_a_mismatch_names_the_arguments_that_were_not_put_back() -> None:
    with pytest.raises(rekindle.CheckpointError, match=r"not as in forward: closing \(Closing\)"):
        rekindle.checkpoint(branch, leaf(3), Closing()).sum().backward()


def test_an_error_of_the_replay_names_the_arguments_that_were_not_put_back() -> None:
    def fails(x: Tensor, closing: Closing) -> Tensor:
        closing.seen.append("ran")
        if len(closing.seen) == 2:
            raise KeyError("seen")
        return x.sin()

    out = rekindle.checkpoint(fails, leaf(3), closing=Closing())
    with pytest.raises(KeyError) as caught:
        out.sum().backward()
    assert "not as in forward: closing (Closing)" in caught.value.__notes__[0]


def test_an_argument_that_leads_to_too_much_is_left_as_it_is_and_named() -> None:
    chain: Any = None
    for _ in range(200):
        chain = Holder([chain])

    def region(x: Tensor, chain: Holder) -> Tensor:
        chain.cache.append("ran")
        return x.sin().sin() if len(chain.cache) == 2 else x.sin()

    out = rekindle.checkpoint(region, leaf(3), chain)
    with pytest.raises(rekindle.CheckpointError, match=r"chain \(Holder, which leads to too much"):
        out.sum().backward()


def test_what_a_closure_or_a_module_holds_is_written_to_twice_as_in_torch() -> None:
    runs: list[str] = []

    class Counting(nn.Module):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            runs.append("ran")
            return x.sin().sin()

    module = Counting()
    rekindle.checkpoint(module, leaf(3)).sum().backward()
    assert (module.runs, len(runs)) == (2, 2)


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: Tensor


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, batch: Batch) -> Tensor:
        return self.blocks(batch.x * batch.scale).square().mean()


def test_fit_leaves_no_gradient_on_what_an_object_in_the_batch_holds() -> None:
    batch = Batch(torch.randn(8, 4), leaf(4))
    rekindle.fit(TakesBatch(), batch, "1GiB")
    assert batch.scale.grad is None
