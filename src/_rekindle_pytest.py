"""The pytest plugin of rekindle: the marker `peak`, and a file of recorded peaks.

    @pytest.mark.peak("24GiB")
    def test_the_training_step_fits():
        return model, batch, loss_fn

pytest imports this module whenever it starts. So it is outside the package, whose import needs
torch: neither is imported before a marked test runs.
"""

import functools
import json
import unittest
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_OPTIONS = ("loss", "optimizer", "like", "plan")
"""Keywords of `assert_peak` that the marker, or the dict that a test returns, may have."""
_UPDATE = "--rekindle-update"
_MEASURED, _TO_RECORD = "rekindle_peak", "rekindle_peak_to_record"
"""Properties of a test's report: they come from the workers of xdist, and are in JUnit files."""
_SCHEMA = {"schema": "rekindle peaks", "version": 1}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("rekindle").addoption(
        _UPDATE,
        action="store_true",
        help="record the peaks of the tests that run and are marked `peak` without a limit",
    )
    parser.addini(
        "rekindle_peaks", "file of recorded peaks, from the root", default="rekindle-peaks.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "peak(limit=None, *, loss=None, optimizer=None, like='H100', plan=None): the training step "
        "that the test returns, as `model, batch`, peaks within a limit such as '24GiB'; without "
        f"one, within the peak that {_UPDATE} recorded",
    )
    config.pluginmanager.register(RecordedPeaks(config), "rekindle-peaks")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse markers on what returns nothing to pytest, and markers with wrong arguments."""
    mark = item.get_closest_marker("peak")
    if mark is None:
        return
    if not isinstance(item, pytest.Function) or (
        item.cls is not None and issubclass(item.cls, unittest.TestCase)
    ):
        raise _misuse("is for test functions; elsewhere, call rekindle.testing.assert_peak")
    _arguments(mark)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a marked test, and measure the step that it returns."""
    mark = pyfuncitem.get_closest_marker("peak")
    if mark is None:
        return (yield)
    test = pyfuncitem.obj

    @functools.wraps(test)
    def measured(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        limit, options = _arguments(mark)
        options |= _step_in(test(*args, **kwargs))
        if limit is None:
            _check_recorded(pyfuncitem, options)
        else:
            _check(pyfuncitem, limit, options)

    pyfuncitem.obj = measured
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


def _arguments(mark: pytest.Mark) -> tuple[int | str | None, dict[str, Any]]:
    """The limit and the options of a marker."""
    options = dict(mark.kwargs)
    limits = [*mark.args, *([options.pop("limit")] if "limit" in options else [])]
    if len(limits) > 1:
        raise _misuse('takes one limit, such as "24GiB"; all else by keyword')
    for name in options:
        if name not in _OPTIONS:
            raise _misuse(f"has no argument {name!r}; it has limit, {', '.join(_OPTIONS)}")
    return (limits[0] if limits else None), options


def _step_in(returned: object) -> dict[str, Any]:
    """The training step that a test returned, as arguments of `assert_peak`."""
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        return dict(zip(("model", "batch", "loss"), returned, strict=False))
    names = ("model", "batch", *_OPTIONS)
    if isinstance(returned, Mapping) and {"model", "batch"} <= returned.keys() <= set(names):
        return dict(returned)
    found = "nothing" if returned is None else f"a {type(returned).__name__}"
    if isinstance(returned, Mapping):
        found = f"a dict of {', '.join(map(str, returned))}"
    raise _misuse(
        "needs a test that returns `model, batch`, `model, batch, loss`, or a dict of "
        f"{', '.join(names)}; this one returned {found}"
    )


def _misuse(why: str) -> BaseException:
    """The failure of a test whose marker is not used as it should be."""
    return pytest.fail.Exception(f"pytest.mark.peak {why}", pytrace=False)


def _check(item: pytest.Function, limit: int | str, options: dict[str, Any]) -> None:
    """Assert that a step is within a limit."""
    __tracebackhide__ = True
    from rekindle.testing import assert_peak  # noqa: PLC0415

    try:
        peak = assert_peak(limit=limit, **options)
    except AssertionError as error:
        raise _failure(item, str(error)) from None
    item.user_properties.append((_MEASURED, peak))


def _check_recorded(item: pytest.Function, options: dict[str, Any]) -> None:
    """Assert that a step is within its recorded peak, or have it recorded."""
    __tracebackhide__ = True
    from rekindle._api.peaks import StepCall, describe_excess, measure_step  # noqa: PLC0415

    plan = options.pop("plan", None)
    if plan == "fit":
        raise _misuse('with plan="fit" needs a limit to fit')
    call = StepCall(**options)
    found = measure_step(call, plan)
    item.user_properties.append((_MEASURED, found.peak))
    recorded: Any = item.config.pluginmanager.get_plugin("rekindle-peaks")
    if recorded.updates:
        item.user_properties.append((_TO_RECORD, found.peak))
        return
    how = f"pytest {_UPDATE} {item.nodeid!r}"
    limit = recorded.known.get(item.nodeid)
    if limit is None:
        raise _failure(item, f"{recorded.path.name} has no peak of this test. To record it: {how}")
    if found.peak > limit:
        text = describe_excess(found, limit, call, plan, "recorded peak")
        raise _failure(item, f"{text}\n  if this is meant, record it: {how}")


def _failure(item: pytest.Function, text: str) -> BaseException:
    """The failure of a test, with the place of the test at its end, as other failures have it."""
    path, line, _ = item.location
    return pytest.fail.Exception(f"{text}\n\n{path}:{(line or 0) + 1}: Failed", pytrace=False)


class RecordedPeaks:
    """The file of recorded peaks: bytes by the test's id."""

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path = config.rootpath / str(config.getini("rekindle_peaks"))
        self.updates = bool(config.getoption(_UPDATE)) and not config.getoption("collectonly")
        self._is_worker = hasattr(config, "workerinput")
        self._new: dict[str, int] = {}

    @functools.cached_property
    def known(self) -> dict[str, int]:
        """The peaks in the file."""
        if not self.path.exists():
            return {}
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if not {**values, **_SCHEMA} == values:
                raise ValueError(f"it should have {_SCHEMA}")
            return dict(values["peaks"])
        except (KeyError, TypeError, ValueError) as error:
            raise pytest.UsageError(f"{self.path} has no recorded peaks: {error}") from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what is to be recorded; with xdist, the workers' reports come here too."""
        if report.when == "call" and report.passed:
            properties = dict(report.user_properties)
            if _TO_RECORD in properties:
                self._new[report.nodeid] = int(str(properties[_TO_RECORD]))

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded; peaks of tests that did not run stay."""
        if self._new and not self._is_worker:
            peaks = dict(sorted({**self.known, **self._new}.items()))
            text = json.dumps({**_SCHEMA, "peaks": peaks}, indent=1)
            self.path.write_text(f"{text}\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._new:
            count = f"{len(self._new)} peak{'' if len(self._new) == 1 else 's'}"
            terminalreporter.write_line(f"rekindle: recorded {count} in {self.path.name}")
