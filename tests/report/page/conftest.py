"""The browser that the tests of pages share."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browsing import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started
