"""The pytest plugin: the marker `peak`, and the file of recorded peaks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.testing import assert_peak
from tests.ranks import ROOT
from tests.test_testing import LARGE, loss_of, stack

pytest_plugins = ["pytester"]

HEAD = """
import pytest
from tests.test_testing import loss_of, stack
"""
FILE = "rekindle-peaks.json"
PLUGIN = ("-p", "_rekindle_pytest")
"""In place of the entry point, which an installed rekindle has."""


@pytest.fixture(scope="module")
def peak() -> int:
    """The peak of the step in these tests.

    The failure imports all that one needs: pytester drops modules that a run imports.
    """
    with pytest.raises(AssertionError):
        assert_peak(*stack(), 0, loss=loss_of)
    return assert_peak(*stack(), LARGE, loss=loss_of)


@pytest.fixture(autouse=True)
def plugin_alone(peak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester: pytest.Pytester, code: str, *args: str) -> pytest.RunResult:
    pytester.makepyfile(test_memory=HEAD + code)
    return pytester.runpytest_inprocess(*PLUGIN, *args)


def test_a_step_within_its_limit_passes_however_it_is_returned(
    pytester: pytest.Pytester, peak: int
) -> None:
    code = f"""
limit = pytest.mark.peak({peak})

@limit
def test_a_model_a_batch_and_a_loss():
    return (*stack(), loss_of)

@pytest.mark.peak({peak}, loss=loss_of)
def test_a_model_and_a_batch():
    return stack()

@limit
def test_a_dict():
    model, batch = stack()
    return dict(model=model, batch=batch, loss=loss_of, like="A100-80GB")

@pytest.fixture
def model():
    return stack()[0]

@pytest.mark.peak(limit={peak})
@pytest.mark.parametrize("like", ["H100", "L4"])
def test_fixtures_and_parameters(model, like):
    return dict(model=model, batch=stack()[1], loss=loss_of, like=like)

class TestInAClass:
    @limit
    def test_a_method(self):
        return (*stack(), loss_of)

def test_without_the_marker():
    pass
"""
    run(pytester, code, "-W", "error").assert_outcomes(passed=7)


def test_a_step_above_its_limit_fails_and_says_what_holds_most(
    pytester: pytest.Pytester, peak: int
) -> None:
    code = f"""
@pytest.mark.peak({peak - 1024}, loss=loss_of)
def test_a_step():
    return stack()
"""
    result = run(pytester, code)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"The training step of Stack as on H100 peaks at * ({peak} bytes): 1 KiB (*) *",
            "  the peak is in the backward of Stack: mul at *test_testing.py:*",
            "  at the peak: *activations *",
            "  most is held by",
            "    * KiB: *toys.py:*  return *",
            "  largest saved tensors",
            "  what would help",
            '* rekindle.apply(model, {"blocks.*": "recompute"})',
            "test_memory.py:4: Failed",
            "FAILED test_memory.py::test_a_step - *",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*During handling*")


@pytest.mark.parametrize(
    ("mark", "returned", "words"),
    [
        ('"1GiB", "2GiB"', "stack()", "takes one limit, such as *"),
        ('"1GiB", limit="2GiB"', "stack()", "takes one limit, such as *"),
        ('"1GiB", los=loss_of', "stack()", "has no argument 'los'; it has limit, loss, *"),
        ('"1GiB"', "None", "needs a test that returns *; this one returned nothing"),
        ('"1GiB"', "stack()[0]", "needs a test that returns *; this one returned a Stack"),
        (
            '"1GiB"',
            "dict(model=1)",
            "needs *; this one returned a dict of model",
        ),
        ('"1GiB"', "dict(model=1, batch=2, los=3)", "needs *; this one returned a dict of *los"),
        ('plan="fit"', "(*stack(), loss_of)", 'with plan="fit" needs a limit to fit'),
    ],
)
def test_misuse_of_the_marker_is_named(
    pytester: pytest.Pytester, mark: str, returned: str, words: str
) -> None:
    result = run(
        pytester, f"@pytest.mark.peak({mark})\ndef test_a_step():\n    return {returned}\n"
    )
    is_known_before = "takes" in words or "no argument" in words
    result.assert_outcomes(errors=is_known_before, failed=not is_known_before)
    result.stdout.fnmatch_lines([f"pytest.mark.peak {words}"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_the_marker_on_a_test_case_is_an_error(pytester: pytest.Pytester) -> None:
    code = """
import unittest

class TestStep(unittest.TestCase):
    @pytest.mark.peak("1GiB")
    def test_a_step(self):
        pass
"""
    result = run(pytester, code)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*call rekindle.testing.assert_peak"])


def test_the_marker_is_listed(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess(*PLUGIN, "--markers", "--strict-markers")
    result.stdout.fnmatch_lines(["@pytest.mark.peak(limit=None, *"])


RECORDED = """
@pytest.mark.peak(loss=loss_of)
def test_a_step():
    return stack()

@pytest.mark.peak("1GiB", loss=loss_of)
def test_with_a_limit():
    return stack()
"""


def test_a_peak_that_is_not_recorded_fails_and_says_how_to(pytester: pytest.Pytester) -> None:
    result = run(pytester, RECORDED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [f"{FILE} has no peak of this test. To record it: pytest --rekindle-update *a_step'"]
    )


def test_a_step_is_held_to_its_recorded_peak(pytester: pytest.Pytester, peak: int) -> None:
    result = run(pytester, RECORDED, "--rekindle-update")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"rekindle: recorded 1 peak in {FILE}"])
    file = pytester.path / FILE
    values = {"schema": "rekindle peaks", "version": 1}
    assert json.loads(file.read_text()) == values | {"peaks": {"test_memory.py::test_a_step": peak}}

    run(pytester, RECORDED).assert_outcomes(passed=2)
    file.write_text(file.read_text().replace(str(peak), str(peak - 1)))
    result = run(pytester, RECORDED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*: 1 B (*) above the recorded peak of * ({peak - 1} bytes).",
            "  if this is meant, record it: pytest --rekindle-update 'test_memory.py::test_a_step'",
        ]
    )


def test_recorded_peaks_of_tests_that_do_not_run_stay(pytester: pytest.Pytester, peak: int) -> None:
    pytester.makeini("[pytest]\nrekindle_peaks = memory/peaks.json")
    file = pytester.mkdir("memory") / "peaks.json"
    values: dict[str, Any] = {"schema": "rekindle peaks", "version": 1, "peaks": {"z.py::z": 7}}
    file.write_text(json.dumps(values))
    run(pytester, RECORDED, "--rekindle-update").assert_outcomes(passed=2)
    values["peaks"]["test_memory.py::test_a_step"] = peak
    assert json.loads(file.read_text()) == values
    assert list(json.loads(file.read_text())["peaks"]) == ["test_memory.py::test_a_step", "z.py::z"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "rekindle plan", "version": 1}'])
def test_a_damaged_file_of_peaks_is_named(pytester: pytest.Pytester, text: str) -> None:
    (pytester.path / FILE).write_text(text)
    result = run(pytester, RECORDED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"*{FILE} has no recorded peaks: *"])


def test_the_peak_is_a_property_of_the_report(pytester: pytest.Pytester, peak: int) -> None:
    run(pytester, RECORDED, "--junitxml=report.xml", "-k", "limit")
    report = (pytester.path / "report.xml").read_text()
    assert f'<property name="rekindle_peak" value="{peak}"' in report


STAND_IN = """
class Found:
    peak = 1234

describe_excess = None

class StepCall:
    def __init__(self, model, batch):
        self.peak = batch

def measure_step(call, plan):
    found = Found()
    found.peak = call.peak
    return found
"""
MANY = """
import pytest

@pytest.mark.peak
@pytest.mark.parametrize("nbytes", [1, 2, 3, 4])
def test_a_step(nbytes):
    return "model", nbytes
"""


def test_peaks_are_recorded_from_the_workers_of_xdist(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contrived: a stand-in for the package, since workers that import torch take long."""
    pytest.importorskip("xdist")
    for folder in ("rekindle", "rekindle/_api"):
        pytester.mkpydir(folder)
    (pytester.path / "rekindle" / "_api" / "peaks.py").write_text(STAND_IN)
    pytester.makepyfile(test_many=MANY)
    args = (*PLUGIN, "-p", "xdist.plugin", "-n", "2", "--rekindle-update")
    monkeypatch.setenv("PYTHONPATH", f"{pytester.path}:{ROOT / 'src'}")
    pytester.runpytest_subprocess(*args).assert_outcomes(passed=4)
    peaks = json.loads((pytester.path / FILE).read_text())["peaks"]
    assert peaks == {f"test_many.py::test_a_step[{n}]": n for n in (1, 2, 3, 4)}


def test_pytest_starts_without_torch_and_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "test_imports.py").write_text(
        "import sys\n"
        "def test_imports():\n"
        "    assert '_rekindle_pytest' in sys.modules\n"
        "    assert not {'torch', 'rekindle', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *PLUGIN, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
