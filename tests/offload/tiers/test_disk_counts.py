"""What observers see of the disk tier."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import rekindle
from rekindle.offload.owners import forget_unowned, shared_offloaders
from rekindle.offload.tiers.disk import DiskCopy
from tests.spilling import DEPTH, PAGE, SECONDS, SENT, Gate, Spill, leaf, spill_to


def test_what_goes_out_comes_in(spill: Spill) -> None:
    with rekindle.observe() as seen:
        for step in range(1, 6):
            loss = spill.forward(leaf())
            spill.settle()
            loss.backward()
            traffic = seen.spill
            assert (traffic.tensors_out, traffic.bytes_out) == (step * SENT, step * SENT * PAGE)
            assert (traffic.tensors_in, traffic.bytes_in) == (step * SENT, step * SENT * PAGE)


def test_every_activation_that_came_in_is_a_hit_or_a_miss(spill: Spill) -> None:
    with rekindle.observe() as seen:
        for _ in range(5):
            spill.gradient(leaf())
    assert seen.spill.prefetch_hits + seen.spill.prefetch_misses == seen.spill.tensors_in


def test_after_the_first_step_every_activation_is_a_hit(spill: Spill) -> None:
    spill.gradient(leaf())
    with rekindle.observe() as seen:
        for _ in range(4):
            loss = spill.forward(leaf())
            spill.settle()
            loss.backward()
    assert (seen.spill.prefetch_hits, seen.spill.prefetch_misses) == (4 * SENT, 0)


def test_what_somebody_holds_is_not_read_back(spill: Spill) -> None:
    x, held = leaf(), []
    with rekindle.observe() as seen:
        with spill.offload:
            hidden = x * 2
            for _ in range(DEPTH):
                held.append(hidden)
                hidden = hidden.sin()
            loss = hidden.sum()
        spill.settle()
        loss.backward()
    assert seen.spill.tensors_out == SENT
    assert seen.spill.tensors_in == 0


def test_bytes_in_memory_are_counted_right_when_writes_end_out_of_order(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, opened, real = leaf(), threading.Event(), os.pwrite

    def held_up(fd: int, data: Any, offset: int) -> int:
        assert offset or opened.wait(SECONDS)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", held_up)
    with rekindle.observe() as seen:
        with spill.offload:
            hidden = x * 2
            middle = hidden = hidden.sin()
            for _ in range(3):
                hidden = hidden.sin()
            loss = hidden.sum()
            del hidden
        second = spill.activations[1]
        assert isinstance(second.copy, DiskCopy)
        second.copy._writing.wait()

        def open_gate(grad: Tensor) -> None:  # the second activation was used, the first was not
            opened.set()
            spill.settle()

        middle.register_hook(open_gate)
        del middle
        loss.backward(retain_graph=True)
        del second
        # The first was wanted before it had left, and stayed.
        assert (seen.spill.tensors_out, seen.spill.tensors_in) == (2, 1)
        assert spill.step.device_bytes == 3 * PAGE


def test_a_thread_that_has_just_written_an_activation_is_not_taken_for_its_holder(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contrived: the thread is stopped between telling the offloader and releasing the bytes."""
    told, opened = threading.Event(), threading.Event()

    def stopped(_: object) -> None:
        told.set()
        opened.wait(SECONDS)

    gate = Gate(monkeypatch, "pwrite")
    loss = spill.forward(leaf(), depth=3)  # one goes
    copy = spill.activations[0].copy
    assert isinstance(copy, DiskCopy)
    copy._writing.when_done(stopped)
    gate.open()
    assert told.wait(SECONDS)
    loss.backward()
    opened.set()
    assert spill.step.record.stays == set()


def test_after_many_steps_as_much_goes_as_in_the_first(spill: Spill) -> None:
    """Nobody waits between forward and backward, so that writes end at any moment."""
    x = leaf()
    for _ in range(400):
        spill.gradient(x)
    with rekindle.observe() as seen:
        spill.gradient(x)
    assert seen.spill.tensors_out == SENT


def test_waits_are_counted_in_seconds(spill: Spill) -> None:
    with rekindle.observe() as seen:
        spill.gradient(leaf())
    assert seen.spill.seconds_waited >= 0
    assert seen.offload.seconds_waited == 0


def test_what_was_seen_prints_as_a_table(spill: Spill) -> None:
    with rekindle.observe() as seen:
        loss = spill.forward(leaf())
        spill.settle()
        loss.backward()
    head, row = str(seen).splitlines()
    names = ["strategy", "tensors out", "bytes out", "tensors in", "bytes in", "prefetch hits"]
    assert all(name in head for name in names)
    assert row.split()[:5] == ["spill", "6", "24,576", "6", "24,576"]


def test_host_memory_is_not_counted_for_the_disk(spill: Spill) -> None:
    with rekindle.observe() as seen:
        spill.gradient(leaf())
    assert seen.offload.tensors_out == 0
    assert seen.offload.pool_bytes == 0


def test_one_offloader_serves_all_blocks_of_the_same_options(tmp_path: Path) -> None:
    forget_unowned()
    for _ in range(3):
        spill_to(tmp_path).gradient(leaf())
    assert len(shared_offloaders()) == 1
