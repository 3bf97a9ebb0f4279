"""Random programs take the same steps when they are compiled with regions and without.

`python -m tests.programs.graphs --count 300` runs more of them.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.graphs import TORCHS_WARNINGS
from tests.programs import graphs
from tests.programs.graphs import RANDOM, Source, differences, source_of

pytestmark = [
    *TORCHS_WARNINGS,
    pytest.mark.filterwarnings("ignore:The region .* is called in compiled code"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(1, 10))
def test_a_random_program_takes_the_same_steps_compiled_with_regions_and_without(
    seed: int, new_offloaders: None, written_at_once: None
) -> None:
    source = source_of(seed)
    assert not differences(source), str(source)


def test_a_random_program_takes_the_same_steps_under_inductor(
    new_offloaders: None, written_at_once: None
) -> None:
    source = source_of(INDUCTOR, "inductor")
    assert differences(source, "inductor") == [], str(source)


INDUCTOR = 7
"""A program with nested regions, spills and random numbers."""


def test_programs_have_nested_policies_spills_random_numbers_and_fates_by_block() -> None:
    texts = [source_of(seed) for seed in range(100)]
    assert len(set(texts)) == 100
    assert sum("        def region" in source.text for source in texts) > 30
    assert sum("spill" in source.text for source in texts) > 50
    random_calls = {re.findall(r"[\w.]+(?=\()", graphs.OPS[op])[0] for op in RANDOM}
    assert all(any(call in source.text for source in texts) for call in random_calls)
    assert sum(bool(source.fates) for source in texts) > 50


def test_a_region_that_gives_other_results_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(function: Any, _policy: str, *args: Any) -> Any:
        return (function(*args) * 1.5,)

    monkeypatch.setitem(graphs.REGIONS, "plain", lambda function, _, *args: (function(*args),))
    monkeypatch.setitem(graphs.REGIONS, "rekindle", careless)
    text = "def program(x, y):\n    return region(torch.sin, 'none', x)"
    source = Source(text, (), "the function")
    assert differences(source) == [
        f"step {step} {name}" for step in (1, 2) for name in ("output 0", "grad x")
    ]
