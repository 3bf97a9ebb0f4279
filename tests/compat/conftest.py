"""Fixtures of the tests of `patch_torch`."""

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.compat.patching import Make


@pytest.fixture
def make_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Import source as a module of its own, which no other test sees."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(source: str) -> ModuleType:
        name = f"library_{tmp_path.name}_{len(made)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        del sys.modules[name]
