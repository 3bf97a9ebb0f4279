"""Public functions have the types that users' type checkers need.

One run of mypy, with the project's settings and cache: about a second after `scripts/check`.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OPTIONS = ["--strict", "--follow-imports", "silent"]  # rekindle itself is for scripts/check


def test_checkpoint_and_its_decorator_keep_the_signature_of_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)
    text, errors, status = mypy.run([*OPTIONS, str(HERE / "signatures.py")])
    assert (text, errors, status) == ("Success: no issues found in 1 source file\n", "", 0)
