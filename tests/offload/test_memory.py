"""What an offloaded step holds, in memory and on disk, and that nothing outlives its use.

All without the garbage collector, which does not see through autograd's nodes.
"""

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.offload.activation import Activation
from rekindle.offload.residency import RETURNING
from rekindle.offload.saved_tensors import KeptTensor, OffloadedTensor
from rekindle.offload.step_activations import StepActivations
from rekindle.offload.tiers.disk import DiskCopy
from rekindle.offload.tiers.workers import Job
from tests.regions.recompute.living import Storages
from tests.spilling import (
    DEPTH,
    PAGE,
    SENT,
    Gate,
    Spill,
    chain,
    count,
    fails,
    leaf,
    open_files,
    spill_to,
)

KINDS = (Activation, OffloadedTensor, KeptTensor, StepActivations, DiskCopy, Job)
LOSS = 4


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """And what lived before a test is no concern of it, nor what torch's first mode leaves."""
    with Storages():
        chain(leaf())
    gc.collect()
    gc.disable()
    gc.freeze()
    yield
    gc.enable()


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return spill_to(tmp_path)


def step(spill: Spill, x: Tensor) -> None:
    """A step in which everything is written before backward begins."""
    loss = spill.forward(x)
    spill.settle()
    loss.backward()
    x.grad = None


def failing(call: Callable[[], Any]) -> str:
    """The name of the error that a call ends in; the error itself dies here."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return "none"


# In memory


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_after_forward_only_the_two_that_backward_wants_first_are_in_memory(
    spill: Spill, steps_before: int
) -> None:
    x = leaf()
    for _ in range(steps_before):
        step(spill, x)
    with Storages() as storages:
        loss = spill.forward(x)
        spill.settle()
        assert storages.alive() == [LOSS, PAGE, PAGE]
    assert loss.shape == ()


def test_an_activation_is_in_memory_until_it_is_written_and_no_longer(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, gate = leaf(), Gate(monkeypatch, "pwrite")
    with Storages() as storages:
        loss = spill.forward(x, depth=4)
        assert storages.alive() == [LOSS, *[PAGE] * 4]
        gate.open()
        spill.settle()
        assert storages.alive() == [LOSS, *[PAGE] * 2]
    assert loss.shape == ()


def test_no_more_than_two_activations_wait_to_be_written(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a first forward: two that may be the last, and two on their way."""
    gate, alive, wait_out = Gate(monkeypatch, "pwrite"), [], DiskCopy.wait_out

    def open_and_wait_out(self: DiskCopy) -> None:
        gate.open()
        wait_out(self)

    monkeypatch.setattr(DiskCopy, "wait_out", open_and_wait_out)
    with Storages() as storages, spill.offload:
        hidden = leaf() * 2
        for _ in range(12):
            hidden = hidden.sin()
            alive.append(len(storages.alive()))
    assert max(alive) == 6  # and the newest, with what it was made from


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_in_backward_no_more_is_in_memory_than_two_ahead(spill: Spill, steps_before: int) -> None:
    x, alive = leaf(), []
    for _ in range(steps_before):
        step(spill, x)
    with spill.offload:
        hidden = x * 2
        for _ in range(DEPTH):
            hidden.register_hook(lambda grad: alive.append(bytes_here(spill)))
            hidden = hidden.sin()
        loss = hidden.sum()
        del hidden
    spill.settle()
    loss.backward()
    assert len(alive) == DEPTH
    assert max(alive) <= 4 * PAGE


def bytes_here(spill: Spill) -> int:
    return sum(
        a.nbytes for a in spill.activations if a.data is not None or a.residency is RETURNING
    )


@pytest.mark.parametrize("retain_graph", [False, True])
def test_after_backward_nothing_that_was_read_back_is_in_memory(
    spill: Spill, retain_graph: bool
) -> None:
    x = leaf()
    with Storages() as storages:
        loss = spill.forward(x)
        spill.settle()
        loss.backward(retain_graph=retain_graph)
        spill.settle()
        assert storages.alive() == [LOSS, PAGE, *([PAGE] * 2 if retain_graph else [])]
        assert bytes_here(spill) == (2 * PAGE if retain_graph else 0)


def test_after_a_backward_that_fails_nothing_that_was_read_back_is_in_memory(
    spill: Spill,
) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("mine")

    with spill.offload:
        hidden = leaf() * 2
        for i in range(DEPTH):
            if i == DEPTH // 2:
                hidden.register_hook(fail)
            hidden = hidden.sin()
        loss = hidden.sum()
        del hidden
    spill.settle()
    assert failing(lambda: loss.backward(retain_graph=True)) == "ValueError"
    assert bytes_here(spill) == 2 * PAGE


def test_a_graph_that_is_thrown_away_leaves_nothing(spill: Spill) -> None:
    with Storages() as storages:
        loss = spill.forward(leaf() * 1)
        spill.settle()
        del loss
        spill.offload.trim()
        assert storages.alive() == []
    assert count(Activation, OffloadedTensor, DiskCopy, Job) == (0, 0, 0, 0)


def test_a_graph_that_is_thrown_away_while_it_is_written_leaves_nothing(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "pwrite")
    with Storages() as storages:
        loss = spill.forward(leaf(), depth=4)
        del loss
        gate.open()
        spill.settle()
        spill.offload.trim()
        assert storages.alive() == []


def test_the_count_of_bytes_that_are_here_is_exact_step_after_step(spill: Spill) -> None:
    x = leaf()
    for _ in range(5):
        loss = spill.forward(x)
        spill.settle()
        spill.offloader._process_finished()
        assert spill.step.device_bytes == bytes_here(spill) == 2 * PAGE
        loss.backward()
        spill.offloader._process_finished()
        assert spill.step.device_bytes == 0


# Room on disk


def test_after_a_step_all_room_is_given_back(spill: Spill) -> None:
    step(spill, leaf())
    assert spill.gives_all_room_back()


def test_after_a_graph_is_thrown_away_all_room_is_given_back(spill: Spill) -> None:
    loss = spill.forward(leaf())
    del loss
    assert spill.gives_all_room_back()


def test_after_an_exception_in_forward_all_room_is_given_back(spill: Spill) -> None:
    def forward() -> None:
        with spill.offload:
            chain(leaf())
            raise ValueError("mine")

    assert failing(forward) == "ValueError"
    assert spill.gives_all_room_back()


def test_after_an_exception_in_backward_all_room_is_given_back(spill: Spill) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("mine")

    def train() -> None:
        x = leaf()
        with spill.offload:
            hidden = x * 2
            hidden.register_hook(fail)
            for _ in range(DEPTH):
                hidden = hidden.sin()
        hidden.sum().backward()

    assert failing(train) == "ValueError"
    assert spill.gives_all_room_back()


def test_after_a_backward_for_chosen_inputs_all_room_is_given_back(spill: Spill) -> None:
    x, y = leaf(), leaf()
    with spill.offload:
        loss = chain(x) + chain(y)
    loss.backward(inputs=[x])
    del loss
    assert spill.gives_all_room_back()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "preadv"])
@pytest.mark.parametrize("on_full", ["keep", "raise"])
@pytest.mark.filterwarnings("ignore:rekindle.offload")
def test_after_an_error_of_the_disk_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, on_full: str
) -> None:
    spill = spill_to(tmp_path, on_full=on_full)
    step(spill, leaf())
    spill.settle()
    spill.offload.trim()
    fails(monkeypatch, call, errno.EIO, passes=lambda n: n < 2)
    for _ in range(3):
        failing(lambda: step(spill, leaf()))
    spill.settle()
    with suppress(rekindle.OffloadError):
        spill.offload.trim()
    assert count(Activation, OffloadedTensor, DiskCopy, Job) == (0, 0, 0, 0)


def test_after_errors_of_the_disk_not_even_the_collector_is_needed_for_the_room(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed read must not hold the graph through its traceback: that would be for good."""
    fails(monkeypatch, "preadv", errno.EIO, passes=lambda n: n < 2)
    assert failing(lambda: step(spill, leaf())) == "OffloadError"
    gc.unfreeze()
    gc.collect()
    assert spill.gives_all_room_back()


# Over many steps


def test_steps_leave_no_objects_behind(spill: Spill) -> None:
    x, found = leaf(), []
    for _ in range(30):
        step(spill, x)
        spill.settle()
        found.append(count(*KINDS))
    assert found[3:] == [found[3]] * 27


def test_steps_that_nobody_finishes_leave_no_objects_behind(spill: Spill) -> None:
    x, found = leaf(), []
    for _ in range(30):
        loss = spill.forward(x)
        spill.settle()
        del loss
        spill.offloader._process_finished()
        found.append(count(*KINDS))
    assert found[3:] == [found[3]] * 27


def test_steps_that_fail_leave_no_objects_behind(spill: Spill) -> None:
    x, found = leaf(), []

    def forward() -> None:
        with spill.offload:
            chain(x)
            raise ValueError("mine")

    for _ in range(30):
        failing(forward)
        spill.settle()
        spill.offloader._process_finished()
        found.append(count(*KINDS))
    assert found[3:] == [found[3]] * 27


def test_steps_of_other_sizes_each_time_leave_a_bounded_memory_behind(spill: Spill) -> None:
    found = []
    for depth in range(3, 43):
        spill.forward(leaf(), depth).backward()
        spill.settle()
        found.append((len(spill.offloader._learned.known), len(spill.offloader._past)))
    assert max(found) == (16, 0)


def test_steps_open_no_files_and_start_no_threads_after_the_first(spill: Spill) -> None:
    x, found = leaf(), set()
    for _ in range(50):
        step(spill, x)
        found.add((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(found) == 1


def test_trims_leave_no_file_open(spill: Spill) -> None:
    x, found = leaf(), set()
    for _ in range(20):
        step(spill, x)
        spill.settle()
        spill.offload.trim()
        found.add(len(os.listdir("/proc/self/fd")))
    assert len(found) == 1


def test_the_file_has_room_for_as_much_as_is_away_at_a_time(spill: Spill) -> None:
    """Gradient accumulation: two graphs at a time take twice the room, and no more ever after."""
    x, sizes = leaf(), []
    for _ in range(6):
        losses = [spill.forward(x), spill.forward(x)]
        spill.settle()
        torch.stack(losses).sum().backward()
        spill.settle()
        sizes.append(os.fstat(spill.fd).st_size)
    assert sizes == [(2 * DEPTH - 2) * PAGE] * 6
    assert SENT == DEPTH - 2


def test_when_no_program_uses_the_options_any_more_their_file_can_be_closed(
    tmp_path: Path,
) -> None:
    for i in range(5):
        (tmp_path / str(i)).mkdir()
        spill = spill_to(tmp_path / str(i))
        step(spill, leaf())
        assert spill.gives_all_room_back()
    assert open_files(os.getpid(), tmp_path) == []
