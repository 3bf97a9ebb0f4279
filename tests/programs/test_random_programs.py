"""Random programs end a step as they do without rekindle, bit for bit.

`pytest tests/programs/test_random_programs.py --programs 5000` draws as many as wanted, new ones
each time.
"""

import functools
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch._dynamo  # when torch imports it later, its traceback keeps whoever set that off alive
from hypothesis import HealthCheck, Phase, assume, find, given, note, settings

import rekindle
from rekindle.regions.recompute.recompute_region import RecomputeRegion
from rekindle.regions.selective.selective_region import SelectiveRegion
from tests.programs import (
    MODES,
    Block,
    Mode,
    Op,
    Program,
    Region,
    Write,
    differences,
    format_program,
    programs,
    run,
)

QUICK = 300
QUICK_ON_A_GPU = 60


@pytest.fixture
def living_regions(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Any]:
    """The regions that are alive."""
    alive: WeakSet[Any] = WeakSet()

    class NotedRecomputeRegion(RecomputeRegion):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            alive.add(self)

    class NotedSelectiveRegion(SelectiveRegion):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            alive.add(self)

    module = sys.modules["rekindle.regions.run"]
    monkeypatch.setattr(module, "RecomputeRegion", NotedRecomputeRegion)
    monkeypatch.setattr(module, "SelectiveRegion", NotedSelectiveRegion)
    return alive


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: on a busy machine, other threads would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _options(wanted: int | None, device: str = "cpu") -> settings:
    return settings(
        max_examples=wanted or (QUICK if device == "cpu" else QUICK_ON_A_GPU),
        derandomize=wanted is None,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def _plain(program: Program, device: str, modes: Mapping[str, Mode]) -> dict[str, Any]:
    """The plain run. A program that plain autograd refuses is not looked at."""
    refused = False
    try:
        return run(program, plain=True, device=device, modes=modes)
    except (RuntimeError, NotImplementedError):
        refused = True
    assume(not refused)
    raise AssertionError


def _check(program: Program, living_regions: WeakSet[Any], device: str) -> None:
    note(format_program(program))
    expected = _plain(program, device, MODES)
    living_regions.clear()
    gc.disable()
    try:
        found = run(program, plain=False, device=device)
        left = _left(living_regions, device)
    finally:
        gc.enable()
    assert not differences(expected, found), "\n".join(differences(expected, found))
    assert left == 0, f"{left} regions are held by a reference cycle"


def _left(living_regions: WeakSet[Any], device: str) -> int:
    """How many regions outlive their step."""
    patience = time.monotonic() + 1
    # A device's thread may let go of the last node a moment after backward has returned.
    while living_regions and device != "cpu" and time.monotonic() < patience:
        time.sleep(0.001)
    return len(living_regions)


def _check_many(request: pytest.FixtureRequest, living_regions: WeakSet[Any], device: str) -> None:
    wanted = request.config.getoption("--programs")
    ran = 0

    @_options(wanted, device)
    @given(programs())
    def check(program: Program) -> None:
        nonlocal ran
        _check(program, living_regions, device)
        ran += 1

    check()
    if wanted is not None:
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(f"\n{ran} random programs ran alike on {device}")


def test_random_programs_end_a_step_as_the_plain_run_does(
    request: pytest.FixtureRequest, living_regions: WeakSet[Any]
) -> None:
    _check_many(request, living_regions, "cpu")


def test_a_mode_that_draws_other_random_numbers_is_found() -> None:
    modes = {"careless": Mode(functools.partial(rekindle.checkpoint, preserve_rng_state=False))}

    def differs(program: Program) -> bool:
        expected = _plain(program, "cpu", modes)
        return bool(differences(expected, run(program, plain=False, modes=modes)))

    options = settings(_options(None), max_examples=500, phases=[Phase.generate])
    assert "careless" in format_program(find(programs(modes), differs, settings=options))


def test_a_program_prints_as_text() -> None:
    region = Region(
        name="region1",
        mode="values",
        form="closure",
        calling="keywords",
        giving="tuple",
        arguments=("x",),
        captured=("y",),
        generator=False,
        body=(Block("no_grad()", (Op("v1", "mul", ("x", "y"), 1),)), Write("add_", ("v1",), 2)),
        results=("v1", "x"),
        outs=("v2", "v3"),
    )
    program = Program(("x", "y"), (region,), ("v2",), ("v3",), "nothing", "backward()", True)
    assert format_program(program).splitlines() == [
        "inputs x, y; parameters learn",
        "def region1(x):  # sees y",
        "    with no_grad():",
        "        v1 = mul(x, y, k=1)",
        "    add_(v1, k=2)",
        "    return v1, x",
        "v2, v3 = run(region1, x)  # values; a closure, takes keywords, gives tuple",
        "outputs v2; not in the loss: v3",
        "between forward and backward: nothing",
        "backward: backward()",
    ]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops that have no deterministic kernel raise, and their programs are not looked at."""
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_random_programs_end_a_step_as_the_plain_run_does_on_a_gpu(
    request: pytest.FixtureRequest, living_regions: WeakSet[Any]
) -> None:
    _check_many(request, living_regions, "cuda")
