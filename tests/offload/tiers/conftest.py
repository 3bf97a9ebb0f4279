"""Fixtures for tests of tiers."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spilling import PAGE, Spill, spill_to


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return spill_to(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk with room for eight activations."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={8 * PAGE}", "tmpfs", str(mounted)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk in memory cannot be mounted here: {error}")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)
