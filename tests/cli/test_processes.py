"""The command as a process: what users of a shell see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = """
import torch
print("imported")
def step():
    print("made")
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU()] * 3
    return torch.nn.Sequential(*layers), torch.zeros(8, 64), lambda out: out.square().mean()
"""


def run(
    *arguments: str, cwd: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_module_of_the_current_folder_is_found_and_json_is_all_that_stdout_has(
    tmp_path: Path,
) -> None:
    pytest.importorskip("scipy")
    (tmp_path / "my_step.py").write_text(STEP)
    script = "import sys; sys.path.pop(0); from rekindle.cli import main; main()"  # as pip's has it
    done = run("-c", script, "plan", "my_step:step", "-l", "t4", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["device"] == "T4"
    assert (done.stderr, done.returncode) == ("imported\nmade\n", 0)


def test_python_runs_it_as_a_module_and_it_exits_with_its_codes() -> None:
    done = run("-m", "rekindle", "plan", "tests.cli.steps:step", "--like", "nothing")
    assert (done.stdout, done.returncode) == ("", 2)


def test_a_shell_completes_devices_by_names_without_spaces() -> None:
    done = run(
        *("-m", "rekindle"),
        _REKINDLE_COMPLETE="complete_bash",
        COMP_WORDS="rekindle plan step:step --like RTX-4",
        COMP_CWORD="4",
    )
    assert done.stdout.split() == ["RTX-4090"]


def test_without_typer_it_says_what_to_install() -> None:
    program = (
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *_: None if name == 'typer' else find(name)\n"
        "from rekindle.cli import main\n"
        "main()"
    )
    done = run("-c", program)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("which is not installed: pip install typer\n")
