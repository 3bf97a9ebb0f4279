"""Full, broken and unwritable disks: what cannot be written stays, what is lost is an error.

Disks are really full where they can be: a small one in memory, where we may mount one.
"""

import errno
import os
import threading
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from torch import Tensor

import rekindle
from tests.spilling import DEPTH, SENT, Gate, Spill, fails, leaf, outcome, plain_gradient, spill_to
from tests.toys import same_bits

FULL = [
    ("posix_fallocate", errno.ENOSPC),
    ("posix_fallocate", errno.EIO),
    ("pwrite", errno.ENOSPC),
    ("pwrite", errno.EIO),
]
"""How a disk says no: to the reservation, or to the write in the background."""


def gradients_and_warnings(
    spill: Spill, x: Tensor, steps: int = 3, depth: int = DEPTH
) -> tuple[list[Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [spill.gradient(x, depth) for _ in range(steps)]
    return found, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("call", "error"), FULL)
@pytest.mark.parametrize("first", [0, 3])
def test_what_cannot_be_written_is_kept_with_one_warning(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, call: str, error: int, first: int
) -> None:
    fails(monkeypatch, call, error, passes=lambda n: n < first)
    x = leaf()
    found, warned = gradients_and_warnings(spill, x)
    assert all(same_bits(grad, plain_gradient(x)) for grad in found)
    assert len(warned) == 1
    assert f"There is no room in '{spill.directory}' for an activation of 4 KiB" in warned[0]
    assert os.strerror(error) in warned[0]


@pytest.mark.parametrize(("call", "error"), FULL)
def test_what_cannot_be_written_raises_one_error_if_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    spill = spill_to(tmp_path, on_full="raise")
    fails(monkeypatch, call, error, passes=lambda n: False)
    with pytest.raises(rekindle.OffloadError) as caught:
        spill.gradient(leaf())
    assert f"There is no room in '{tmp_path}'" in str(caught.value)
    assert os.strerror(error) in str(caught.value)


@pytest.mark.parametrize(("call", "error"), FULL)
@pytest.mark.parametrize("on_full", ["keep", "raise"])
def test_when_there_is_room_again_activations_go_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, on_full: str
) -> None:
    spill, x = spill_to(tmp_path, on_full=on_full), leaf()
    with monkeypatch.context() as patch:
        fails(patch, call, error, passes=lambda n: False)
        if on_full == "keep":
            gradients_and_warnings(spill, x)
        else:
            with pytest.raises(rekindle.OffloadError):
                spill.gradient(x)
    with rekindle.observe() as seen:
        for _ in range(3):
            assert same_bits(spill.gradient(x), plain_gradient(x))
    assert seen.spill.tensors_out == 3 * SENT


def test_writes_of_a_step_that_failed_do_not_fail_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several writes fail at a time, after the forward they belong to has failed by itself."""
    spill, x = spill_to(tmp_path, quota=0.5, on_full="raise"), leaf()
    for _ in range(3):
        spill.gradient(x)
    with monkeypatch.context() as patch:
        fails(patch, "pwrite", errno.ENOSPC, passes=lambda n: False)
        gate = Gate(patch, "pwrite")
        with pytest.raises(ValueError, match="mine"), spill.offload:  # noqa: PT012
            hidden = x * 2
            for _ in range(DEPTH // 2):
                hidden = hidden.sin()
            raise ValueError("mine")
        del hidden
        gate.open()
        spill.settle()
    for _ in range(3):
        assert same_bits(spill.gradient(x), plain_gradient(x))


def test_a_full_disk_does_not_hide_an_error_of_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, x = spill_to(tmp_path, on_full="raise"), leaf()
    fails(monkeypatch, "pwrite", errno.ENOSPC, passes=lambda n: False)
    gate = Gate(monkeypatch, "pwrite")
    with pytest.raises(KeyboardInterrupt), spill.offload:  # noqa: PT012
        hidden = x * 2
        for _ in range(3):  # the first of which goes
            hidden = hidden.sin()
        gate.open()
        spill.settle()
        raise KeyboardInterrupt


@pytest.mark.parametrize(("call", "error"), FULL)
@pytest.mark.parametrize("on_full", ["keep", "raise"])
def test_no_room_is_lost_to_writes_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int, on_full: str
) -> None:
    spill, x = spill_to(tmp_path, on_full=on_full), leaf()
    fails(monkeypatch, call, error, passes=lambda n: n < 3)
    if on_full == "keep":
        gradients_and_warnings(spill, x)
    else:
        with pytest.raises(rekindle.OffloadError):
            spill.gradient(x)
    assert spill.gives_all_room_back()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOMEM])
def test_what_cannot_be_read_back_raises_one_error(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    loss = spill.forward(leaf())
    spill.settle()
    fails(monkeypatch, "preadv", error, passes=lambda n: n < 2)
    with pytest.raises(rekindle.OffloadError) as caught:
        loss.backward()
    assert f"could not be read back from '{spill.directory}'" in str(caught.value)
    assert os.strerror(error) in str(caught.value)


def test_a_file_that_was_cut_short_raises_one_error(spill: Spill) -> None:
    loss = spill.forward(leaf())
    spill.settle()
    os.ftruncate(spill.fd, 0)
    with pytest.raises(rekindle.OffloadError, match="ends too early"):
        loss.backward()


def test_after_a_failed_read_the_same_backward_may_be_tried_again(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf()
    loss = spill.forward(x)
    spill.settle()
    with monkeypatch.context() as patch:
        fails(patch, "preadv", errno.EIO, passes=lambda n: n < 2)
        with pytest.raises(rekindle.OffloadError):
            loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert same_bits(x.grad, plain_gradient(x))


def test_no_room_is_lost_to_reads_that_fail(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = spill.forward(leaf())
    spill.settle()
    fails(monkeypatch, "preadv", errno.EIO, passes=lambda n: n < 2)
    with pytest.raises(rekindle.OffloadError):
        loss.backward()
    del loss
    assert spill.gives_all_room_back()


def test_on_a_disk_that_is_full_as_much_goes_as_fits(small_disk: Path) -> None:
    spill, x = spill_to(small_disk), leaf()
    with rekindle.observe() as seen:
        (found,), warned = gradients_and_warnings(spill, x, steps=1, depth=14)
    assert same_bits(found, plain_gradient(x, 14))
    assert seen.spill.tensors_out == 8
    assert len(warned) == 1
    assert "No space left on device" in warned[0]


def test_on_a_disk_that_is_full_one_error_is_raised_if_asked_to(small_disk: Path) -> None:
    spill, x = spill_to(small_disk, on_full="raise"), leaf()
    with pytest.raises(rekindle.OffloadError, match="No space left on device"):
        spill.gradient(x, depth=14)
    assert same_bits(spill.gradient(x), plain_gradient(x))
    assert spill.gives_all_room_back()


def test_trim_frees_a_disk_that_was_full(small_disk: Path) -> None:
    spill, before = spill_to(small_disk, on_full="raise"), os.statvfs(small_disk).f_bfree
    with pytest.raises(rekindle.OffloadError):
        spill.gradient(leaf(), depth=14)
    spill.settle()
    spill.offload.trim()
    assert os.statvfs(small_disk).f_bfree == before


@pytest.mark.parametrize("on_full", ["keep", "raise"])
def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path, on_full: str) -> None:
    text = f"""
        import resource
        spill = spill_to(Path(sys.argv[1]), on_full="{on_full}")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, 4 * PAGE))
        warnings.simplefilter("always")
        with warnings.catch_warnings(record=True) as caught:
            for _ in range(3):
                try:
                    print(torch.equal(spill.gradient(x), plain_gradient(x)))
                except rekindle.OffloadError as error:
                    print("File too large" in str(error))
        print(len(caught), spill.file.size // PAGE)
    """
    warned = 1 if on_full == "keep" else 0
    assert outcome(text, tmp_path) == (0, f"True\nTrue\nTrue\n{warned} 4", "")


@pytest.mark.parametrize("on_full", ["keep", "raise"])
def test_an_unwritable_directory_is_a_full_disk(on_full: str) -> None:
    """Tried by a process that is not root, who may write anywhere."""
    text = f"""
        directory = Path(sys.argv[1])
        os.chmod(directory, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        spill = spill_to(directory, on_full="{on_full}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                print(torch.equal(spill.gradient(x), plain_gradient(x)))
            except rekindle.OffloadError as error:
                print("Permission denied" in str(error), str(directory) in str(error))
        print(*["Permission denied" in str(warning.message) for warning in caught])
    """
    printed = "True\nTrue" if on_full == "keep" else "True True"
    with TemporaryDirectory() as directory:  # pytest's own is in one that only its owner enters
        assert outcome(text, Path(directory)) == (0, printed, "")


def test_a_directory_that_does_not_exist_is_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is none at .*missing"):
        rekindle.offload(tier="disk", directory=tmp_path / "missing")


def test_a_file_in_place_of_the_directory_is_refused_at_the_call(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="existing folder"):
        rekindle.offload(tier="disk", directory=tmp_path / "file")


def test_a_directory_that_was_removed_before_the_first_step_is_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    spill, x = spill_to(tmp_path / "gone"), leaf()
    spill.directory.rmdir()
    found, warned = gradients_and_warnings(spill, x)
    assert all(same_bits(grad, plain_gradient(x)) for grad in found)
    assert len(warned) == 1
    assert "No such file or directory" in warned[0]


def test_a_directory_that_was_removed_between_steps_is_not_missed(tmp_path: Path) -> None:
    """The file is open, and that is all it takes."""
    (tmp_path / "gone").mkdir()
    spill, x = spill_to(tmp_path / "gone"), leaf()
    spill.gradient(x)
    spill.directory.rmdir()
    for _ in range(3):
        assert same_bits(spill.gradient(x), plain_gradient(x))


def test_where_no_thread_can_be_started_the_calling_one_does_the_work(
    spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    x = leaf()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        found, warned = gradients_and_warnings(spill, x)
    assert all(same_bits(grad, plain_gradient(x)) for grad in found)
    assert not warned
