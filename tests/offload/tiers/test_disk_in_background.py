"""Threads that write and read in the background, and threads that train on one file."""

import errno
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.spilling import DEPTH, PAGE, SECONDS, SENT, Gate, Spill, fails, leaf, plain_gradient
from tests.toys import same_bits


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_the_threads_of_the_tier_read_and_write_and_nobody_else(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real, threads = getattr(os, call), []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return real(*args)

    monkeypatch.setattr(os, call, noted)
    loss = spill.forward(leaf())
    spill.settle()
    loss.backward()
    assert len(threads) == SENT
    assert threading.current_thread().name not in threads


def test_the_forward_goes_on_while_a_write_is_held_up(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, gate = leaf(), Gate(monkeypatch, "pwrite")
    loss = spill.forward(x, depth=4)  # two go, neither of which is waited for
    assert gate.reached.wait(SECONDS)
    gate.open()
    (found,) = torch.autograd.grad(loss, x)
    assert same_bits(found, plain_gradient(x, 4))


def test_the_backward_does_not_wait_for_a_write_that_is_held_up(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not written yet is still at hand."""
    x, gate = leaf(), Gate(monkeypatch, "pwrite")
    with rekindle.observe() as seen:
        (found,) = torch.autograd.grad(spill.forward(x, depth=4), x)
    gate.open()
    assert same_bits(found, plain_gradient(x, 4))
    assert (seen.spill.tensors_out, seen.spill.tensors_in) == (2, 0)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_read_begins_before_backward_asks_for_it(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, steps_before: int
) -> None:
    """Backward is held where it has used the two activations that stayed, until a read begins."""
    x, began = leaf(), []
    for _ in range(steps_before):
        loss = spill.forward(x)
        spill.settle()
        loss.backward()
    gate = Gate(monkeypatch, "preadv")
    gate.open()

    def hold(grad: Tensor) -> None:
        began.append(gate.reached.wait(SECONDS))

    with spill.offload:
        hidden = x * 2
        for i in range(DEPTH):
            if i == SENT:
                hidden.register_hook(hold)
            hidden = hidden.sin()
        loss = hidden.sum()
    spill.settle()
    loss.backward()
    assert began == [True]


def test_a_graph_thrown_away_while_it_is_written_gives_its_room_back(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "pwrite")
    loss = spill.forward(leaf(), depth=4)
    assert gate.reached.wait(SECONDS)
    del loss
    gate.open()
    spill.settle()
    spill.offload.trim()
    assert spill.file.size == 0


def test_room_is_not_used_again_while_it_is_still_written(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of a graph that was thrown away must not land in the next one's room."""
    x, other = leaf(), leaf()
    with monkeypatch.context() as patch:
        gate = Gate(patch, "pwrite")
        loss = spill.forward(other, depth=4)
        assert gate.reached.wait(SECONDS)
        del loss
        spill.offloader._copy_outs.queue._queue.clear()
    loss = spill.forward(x, depth=4)
    gate.open()
    spill.settle()
    (found,) = torch.autograd.grad(loss, x)
    assert same_bits(found, plain_gradient(x, 4))


@pytest.mark.parametrize("first", range(3))
def test_writes_may_be_done_in_any_order(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    x, opened = leaf(), threading.Event()
    real = os.pwrite

    def held_up(fd: int, data: Any, offset: int) -> int:
        if offset == first * PAGE:
            assert opened.wait(SECONDS)
        return real(fd, data, offset)

    for _ in range(2):
        spill.gradient(x, depth=5)
    monkeypatch.setattr(os, "pwrite", held_up)
    timer = threading.Timer(0.2, opened.set)
    timer.start()
    for _ in range(3):
        assert same_bits(spill.gradient(x, depth=5), plain_gradient(x, 5))
    timer.join()


def in_threads(work: Callable[[int], None], threads: int = 8) -> None:
    together = threading.Barrier(threads)

    def run(i: int) -> None:
        together.wait(SECONDS)
        work(i)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(run, i) for i in range(threads)]:
            done.result(SECONDS)


def test_threads_share_a_file_and_get_the_plain_gradients(spill: Spill) -> None:
    leaves = [leaf() for _ in range(8)]
    expected = [plain_gradient(x, DEPTH + i) for i, x in enumerate(leaves)]

    def work(i: int) -> None:
        for _ in range(15):
            assert same_bits(spill.gradient(leaves[i], DEPTH + i), expected[i])

    in_threads(work)
    spill.offload.trim()
    spill.settle()
    spill.offload.trim()
    assert spill.file.size == 0


def test_threads_with_failing_writes_get_the_plain_gradients(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves = [leaf() for _ in range(8)]
    expected = [plain_gradient(x) for x in leaves]
    fails(monkeypatch, "pwrite", errno.EIO, passes=lambda n: n % 5 > 0)

    def work(i: int) -> None:
        for _ in range(15):
            assert same_bits(spill.gradient(leaves[i]), expected[i])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_threads(work)
    assert len(caught) == 1
    assert spill.gives_all_room_back()


def test_a_graph_may_be_used_by_another_thread_than_made_it(spill: Spill) -> None:
    x = leaf()
    losses = [spill.forward(x) for _ in range(8)]
    expected = plain_gradient(x)

    def work(i: int) -> None:
        (found,) = torch.autograd.grad(losses[i], x)
        assert same_bits(found, expected)

    in_threads(work)
