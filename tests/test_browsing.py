"""A browser that is missing is a reason to skip, unless one is required."""

from pathlib import Path

import pytest

from tests import browsing


@pytest.fixture(autouse=True)
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.browsing.shutil.which", lambda name: None)


def test_without_a_browser_tests_are_skipped_and_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(browsing.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        browsing.chromium(tmp_path).__enter__()


def test_without_a_browser_tests_fail_where_one_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(browsing.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="is set, but no Chromium"):
        browsing.chromium(tmp_path).__enter__()


def test_the_checks_before_a_change_goes_in_require_a_browser() -> None:
    run = Path(__file__).parents[1] / ".ci" / "run"
    assert f"export {browsing.REQUIRED}=1" in run.read_text()
