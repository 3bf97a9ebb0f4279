"""What every test of compiled regions begins with."""

from collections.abc import Iterator

import pytest

from rekindle.compile import graph_breaks
from tests.graphs import fresh_compiler


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing was compiled before, and no graph has broken."""
    graph_breaks.warned.clear()
    with fresh_compiler():
        yield
