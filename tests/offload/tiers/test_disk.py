"""The disk tier for real: what is on disk, who reads and writes it, and what happens when it fails.

Forked and killed processes, full and unwritable disks are real where they can be: programs of their
own, `kill -9`, a small disk in memory where we may mount one.
"""

import errno
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.offload.owners import forget_shared, shared_offloaders
from rekindle.offload.tiers import spill_file
from rekindle.offload.tiers.disk import DiskCopy, DiskTier
from tests.spilling import (
    DEPTH,
    PAGE,
    SECONDS,
    SENT,
    Gate,
    Spill,
    fails,
    leaf,
    no_tmpfile,
    open_files,
    outcome,
    plain_gradient,
    program,
    spill_to,
)
from tests.toys import Stack, assert_same_step, same_bits

FULL = [
    ("posix_fallocate", errno.ENOSPC),
    ("posix_fallocate", errno.EIO),
    ("pwrite", errno.ENOSPC),
    ("pwrite", errno.EIO),
]
"""How a disk says no: to the reservation, or to the write in the background."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk with room for eight activations."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * PAGE}", "tmpfs", str(mounted)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk in memory cannot be mounted here: {error}")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return spill_to(tmp_path)


# Gradients


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
    copy = tier.send(data, None)
    assert copy is not None
    copy.wait_out()
    copy.fetch()
    assert torch.equal(copy.take(), data)
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


# What is on disk


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


# How a process ends


KILLED = {
    "in the middle of forward": """
        with spill.offload:
            loss = chain(x)
            spill.settle()
            stop()
    """,
    "in the middle of backward": """
        with spill.offload:
            hidden = x * 2
            for i in range(DEPTH):
                hidden = hidden.sin()
                if i == DEPTH // 2:
                    hidden.register_hook(stop)
        hidden.sum().backward()
    """,
    "in the middle of a write": """
        real = os.pwrite
        def half(fd, data, offset):
            real(fd, data[: len(data) // 2], offset)
            stop()
        os.pwrite = half
        spill.forward(x)
    """,
    "in the middle of a read": """
        loss = spill.forward(x)
        spill.settle()
        os.preadv = stop
        loss.backward()
    """,
    "between steps": """
        spill.gradient(x)
        stop()
    """,
    "where files cannot be nameless": """
        no_tmpfile(MonkeyPatch())
        spill.gradient(x)
        stop()
    """,
}


@pytest.mark.parametrize("when", KILLED)
def test_nothing_is_left_after_kill(tmp_path: Path, when: str) -> None:
    with program(KILLED[when], tmp_path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        (file,) = open_files(running.pid, tmp_path)
        assert file.st_nlink == 0
        assert file.st_size > 0
        assert os.listdir(tmp_path) == []
        running.send_signal(signal.SIGKILL)
        assert running.wait(SECONDS) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_after_kill_the_disk_is_as_free_as_before(small_disk: Path) -> None:
    before = os.statvfs(small_disk).f_bfree
    with program(KILLED["in the middle of backward"], small_disk) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        assert os.statvfs(small_disk).f_bfree == before - SENT
        running.kill()
        running.wait(SECONDS)
    assert os.statvfs(small_disk).f_bfree == before


ENDINGS = {
    "the end of the program": ("", 0, ""),
    "an exception": ("raise ValueError('end')", 1, "ValueError: end"),
    "an interrupt": ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "os._exit": ("os._exit(4)", 4, ""),
    "a signal": ("os.kill(os.getpid(), 15)", -signal.SIGTERM, ""),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_after(tmp_path: Path, ending: str) -> None:
    """And nobody complains; a graph is alive, a forward is running."""
    last, status, complaint = ENDINGS[ending]
    text = f"""
        loss = spill.forward(x)
        with spill.offload:
            other = chain(x)
            {last}
    """
    found = outcome(text, tmp_path)
    assert found[0] == status
    assert found[2].splitlines()[-1:] == [complaint][: bool(complaint)]
    assert "ignored" not in found[2]
    assert os.listdir(tmp_path) == []


def test_a_program_ends_at_once_with_writes_and_reads_outstanding(tmp_path: Path) -> None:
    text = """
        big = torch.randn(2**20, requires_grad=True)
        losses = [spill.forward(big) for _ in range(4)]
        losses[0].backward(retain_graph=True)
        print("end")
    """
    assert outcome(text, tmp_path) == (0, "end", "")


def test_a_thread_may_go_on_training_after_the_main_thread_has_ended(tmp_path: Path) -> None:
    """From then on Python accepts no new work for its pools of threads."""
    text = """
        def train():
            threading.main_thread().join()
            expected = plain_gradient(x)
            print(all(torch.equal(spill.gradient(x), expected) for _ in range(3)))
        threading.Thread(target=train).start()
    """
    assert outcome(text, tmp_path) == (0, "True", "")


def test_a_backward_may_run_while_the_interpreter_exits(tmp_path: Path) -> None:
    text = """
        import atexit
        loss = spill.forward(x)
        spill.settle()
        atexit.register(lambda: print(torch.equal(torch.autograd.grad(loss, x)[0], expected)))
        expected = plain_gradient(x)
    """
    assert outcome(text, tmp_path) == (0, "True", "")


# Fork


def test_a_forked_process_has_an_offloader_of_its_own(tmp_path: Path) -> None:
    text = """
        expected = plain_gradient(x)
        loss = spill.forward(x)
        spill.settle()
        if not os.fork():
            signal.alarm(20)
            os._exit(0 if all(torch.equal(spill.gradient(x), expected) for _ in range(3)) else 1)
        print(os.wait()[1], torch.equal(torch.autograd.grad(loss, x)[0], expected))
    """
    assert outcome(text, tmp_path) == (0, "0 True", "")


FORKED = {
    "a backward through the graph of its parent": """
        loss = spill.forward(x)
        spill.settle()
        step = lambda: torch.autograd.grad(loss, x)[0]
        pid = os.fork()
    """,
    "a forward that its parent began": """
        spill.gradient(x)
        spill.settle()
        spill.offload.__enter__()
        pid = os.fork()
        def step():
            loss = chain(x)
            spill.offload.__exit__(None, None, None)
            return torch.autograd.grad(loss, x)[0]
    """,
}


@pytest.mark.parametrize("what", FORKED)
def test_a_forked_process_gets_the_right_gradients_or_an_error_from(
    tmp_path: Path, what: str
) -> None:
    """The threads of its parent are not there: it must not wait for them."""
    text = f"""
        expected = plain_gradient(x)
        {FORKED[what].strip()}
        if not pid:
            signal.alarm(5)
            try:
                found = step()
            except rekindle.OffloadError:
                os._exit(0)
            os._exit(0 if torch.equal(found, expected) else 1)
        status = os.wait()[1]
        print(status, torch.equal(step(), expected))
    """
    assert outcome(text, tmp_path) == (0, "0 True", "")


def test_a_forked_process_does_not_read_what_its_parent_wrote_after(tmp_path: Path) -> None:
    """They share one file; its room is the parent's to use again."""
    text = """
        expected = plain_gradient(x)
        loss = spill.forward(x)
        for future in [a.copy._writing for a in spill.activations if a.copy]:
            future.wait()
        workers.wait_until_idle()
        tell, told = os.pipe()
        if not os.fork():
            signal.alarm(10)
            os.read(tell, 1)
            try:
                found = torch.autograd.grad(loss, x)[0]
            except rekindle.OffloadError:
                os._exit(0)
            os._exit(0 if torch.equal(found, expected) else 1)
        del loss
        spill.gradient(leaf())
        spill.gradient(leaf())
        os.write(told, b"!")
        print(os.wait()[1])
    """
    assert outcome(text, tmp_path) == (0, "0", "")


# Full, broken, unwritable


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


# In the background


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


# Threads


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


# What is seen


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
    """Contrived: the thread is stopped between telling the engine and letting go of the bytes."""
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
    names = ["fate", "tensors out", "bytes out", "tensors in", "bytes in", "prefetch hits"]
    assert all(name in head for name in names)
    assert row.split()[:5] == ["spill", "6", "24,576", "6", "24,576"]


def test_host_memory_is_not_counted_for_the_disk(spill: Spill) -> None:
    with rekindle.observe() as seen:
        spill.gradient(leaf())
    assert seen.offload.tensors_out == 0
    assert seen.offload.pool_bytes == 0


def test_one_offloader_serves_all_blocks_of_the_same_options(tmp_path: Path) -> None:
    forget_shared()
    for _ in range(3):
        spill_to(tmp_path).gradient(leaf())
    assert len(shared_offloaders()) == 1
