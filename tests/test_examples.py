"""The examples run, and find that nothing differs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from examples import demo

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    """What it prints; each of them ends with 1 if a bit differs."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_ends_with_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy")
    page = tmp_path / "demo.html"
    for name, value in {"STEPS": 1, "LAYERS": 2, "BATCH": 2, "BUDGETS": ("75%",)}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--page", str(page)])
    assert demo.main() == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(page.as_uri())
    assert "Pin to compare" in page.read_text()


def test_the_trainer_of_transformers() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    printed = run("examples/transformers_trainer.py")
    assert printed.count("40 regions, 40 replays") == 2  # 4 layers, 10 steps
    assert "same losses and parameters: yes" in printed


def test_a_module_of_lightning() -> None:
    pytest.importorskip("lightning")
    printed = run("examples/lightning_module.py")
    assert printed.count("80 regions, 80 replays") == 2  # 4 layers, 20 steps
    assert "same losses and parameters: yes" in printed


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
def test_fsdp2_over_two_processes() -> None:
    printed = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        "examples/fsdp2.py",
    )
    assert printed.count("40 regions, 40 replays") == 2  # 4 layers, 10 steps
    assert "same losses and parameters: yes" in printed
