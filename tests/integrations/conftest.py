"""Fixtures of the integrations' tests."""

from collections.abc import Iterator
from typing import Any

import pytest

import rekindle


@pytest.fixture
def patched() -> Iterator[Any]:
    with rekindle.patch_torch() as patch:
        yield patch
