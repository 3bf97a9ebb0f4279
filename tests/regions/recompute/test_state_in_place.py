"""Tensors that an object holds and that are written to in place; objects that are left alone."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.regions.recompute.state_caches import Holder, plainly, region_of
from tests.toys import gradients, leaf, same_bits

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
