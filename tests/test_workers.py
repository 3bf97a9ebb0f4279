"""How many processes the tests run in, and which files start first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest

Source = pytest.Config.ArgsSource


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def workers(source: Source = Source.TESTPATHS, **options: Any) -> int:
    """How many there are with `-n auto`, by where the files come from and what pytest is given."""
    config: Any = SimpleNamespace(args_source=source, getoption=options.get)
    return conftest.pytest_xdist_auto_num_workers(config)


def test_a_whole_run_has_a_process_for_each_core() -> None:
    assert workers(keyword="", markexpr="", lf=False) == 4


@pytest.mark.parametrize("option", ["keyword", "markexpr", "lf", "stepwise"])
def test_a_part_that_an_option_selects_has_one_process(option: str) -> None:
    assert workers(**{option: "dropout"}) == 0


def test_files_that_are_named_have_one_process() -> None:
    assert workers(Source.ARGS) == 0


def test_tests_that_share_a_gpu_have_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert workers() == 0


def test_many_cores_have_no_more_processes_than_memory_is_likely_to_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conftest, "cores", lambda: 128)
    assert workers() == conftest.MOST_WORKERS


@pytest.mark.parametrize("name", conftest.LONGEST)
def test_a_file_that_starts_first_is_there(name: str) -> None:
    assert (Path(__file__).parent / name).exists()
