"""The disk tier for real: gradients, and what is on disk."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.offload.tiers import spill_file
from rekindle.offload.tiers.disk import DiskTier
from tests.spilling import PAGE, SENT, Spill, leaf, no_tmpfile, open_files, plain_gradient, spill_to
from tests.toys import Stack, assert_same_step, same_bits


def test_gradients_are_those_of_the_plain_run_step_after_step(spill: Spill) -> None:
    model, x = Stack(depth=4, dim=32, drop=0.1), torch.randn(16, 32, requires_grad=True)

    def spilled() -> Tensor:
        with spill.offload:
            out: Tensor = model(x)
            return out

    for _ in range(6):
        assert_same_step(lambda: model(x), spilled, [x, *model.parameters()])


@pytest.mark.parametrize("quota", ["auto", 0.0, 0.5, 3 * PAGE])
def test_gradients_are_those_of_the_plain_run_under_any_quota(tmp_path: Path, quota: Any) -> None:
    spill, x = spill_to(tmp_path, quota=quota), leaf()
    expected = plain_gradient(x)
    for _ in range(4):
        assert same_bits(spill.gradient(x), expected)


@pytest.mark.parametrize("piece", [1, 1000, PAGE - 1, PAGE, PAGE + 1])
def test_an_activation_is_the_same_after_being_cut_in_pieces(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(spill_file, "_PIECE", piece)
    x = leaf()
    assert same_bits(spill.gradient(x), plain_gradient(x))


def test_an_activation_longer_than_two_pieces_comes_back_the_same(tmp_path: Path) -> None:
    data = torch.randint(256, (130 * 2**20 + 5,), dtype=torch.uint8)
    assert data.numel() > 2 * spill_file._PIECE
    tier = DiskTier(str(tmp_path))
    copy = tier.begin_copy_out(data, None)
    assert copy is not None
    copy.wait_out()
    copy.begin_return()
    assert torch.equal(copy.finish_return(), data)
    copy.close()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_an_activation_is_the_same_after_short_writes_and_reads(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The system may take or give fewer bytes than it was asked to."""
    real = getattr(os, call)

    def short(fd: int, data: Any, offset: int) -> int:
        part = data[:1001] if call == "pwrite" else [data[0][:1001]]
        return int(real(fd, part, offset))

    monkeypatch.setattr(os, call, short)
    x = leaf()
    assert same_bits(spill.gradient(x), plain_gradient(x))


def test_the_directory_is_empty_while_activations_are_on_disk(spill: Spill) -> None:
    loss = spill.forward(leaf())
    spill.settle()
    assert os.fstat(spill.fd).st_size == SENT * PAGE
    assert os.fstat(spill.fd).st_nlink == 0
    assert os.listdir(spill.directory) == []
    assert loss.shape == ()


def test_the_directory_is_empty_where_files_cannot_be_nameless(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_tmpfile(monkeypatch)
    loss = spill.forward(leaf())
    spill.settle()
    assert os.fstat(spill.fd).st_size == SENT * PAGE
    assert os.fstat(spill.fd).st_nlink == 0
    assert os.listdir(spill.directory) == []
    assert loss.shape == ()


def test_gradients_are_right_where_files_cannot_be_nameless(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_tmpfile(monkeypatch)
    x = leaf()
    assert same_bits(spill.gradient(x), plain_gradient(x))


def test_gradients_are_right_where_room_cannot_be_reserved(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS has no `posix_fallocate`."""
    monkeypatch.delattr(os, "posix_fallocate")
    x = leaf()
    assert same_bits(spill.gradient(x), plain_gradient(x))


@pytest.mark.parametrize("nameless", [True, False])
def test_a_program_that_is_executed_does_not_inherit_the_file(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    if not nameless:
        no_tmpfile(monkeypatch)
    spill.gradient(leaf())
    assert not os.get_inheritable(spill.fd)


def test_the_file_is_for_its_owner_alone(spill: Spill) -> None:
    spill.gradient(leaf())
    assert os.fstat(spill.fd).st_mode & 0o777 == 0o600


def test_the_file_does_not_grow_after_the_first_step(spill: Spill) -> None:
    x, sizes = leaf(), []
    with rekindle.observe() as seen:
        for _ in range(10):
            spill.gradient(x)
            sizes.append((os.fstat(spill.fd).st_size, seen.spill.pool_bytes))
    assert sizes == [(SENT * PAGE, SENT * PAGE)] * 10


def test_trim_gives_the_disk_back(spill: Spill) -> None:
    spill.gradient(leaf())
    spill.settle()
    assert len(open_files(os.getpid(), spill.directory)) == 1
    spill.offload.trim()
    assert open_files(os.getpid(), spill.directory) == []
    assert spill.file.size == 0


def test_trim_leaves_what_is_in_use(spill: Spill) -> None:
    x = leaf()
    loss = spill.forward(x)
    spill.settle()
    spill.offload.trim()
    assert spill.file.size == SENT * PAGE
    (found,) = torch.autograd.grad(loss, x)
    assert same_bits(found, plain_gradient(x))


def test_after_trim_the_next_step_begins_a_new_file(spill: Spill) -> None:
    x = leaf()
    for _ in range(3):
        assert same_bits(spill.gradient(x), plain_gradient(x))
        spill.settle()
        spill.offload.trim()
        assert spill.file.size == 0


def test_trim_before_anything_was_offloaded_does_nothing(spill: Spill) -> None:
    spill.offload.trim()
    assert os.listdir(spill.directory) == []
