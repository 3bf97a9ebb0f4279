"""What the disk tier leaves behind when processes end, are killed, or are forked.

Forked and killed processes are real: programs of their own, `kill -9`.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.spilling import SECONDS, SENT, open_files, outcome, program

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
