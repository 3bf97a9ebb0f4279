"""`python -m tests.programs.hunt`: finds what is wrong, and says how to see it again."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pytest

import rekindle
from tests.programs import Chunks, Program, Region, Write, program_of
from tests.programs import hunt as hunting
from tests.programs.hunt import WAYS, Batch, Failure, Way, format_counts, format_failure, look_at
from tests.programs.modes import MODES, Mode
from tests.programs.steps import Block, Step


def careless(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return rekindle.checkpoint(function, *args, preserve_rng_state=False, **kwargs)


def broken(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise ValueError("it does not work")


def steps_of(body: tuple[Step, ...]) -> list[Step]:
    found = []
    for step in body:
        found += [step, *steps_of(getattr(step, "body", ()))]
    return found


def test_a_program_is_the_same_for_a_seed_each_time() -> None:
    programs = [[program_of(seed) for seed in range(50)] for _ in range(2)]
    assert programs[0] == programs[1]
    assert len(set(programs[0])) == 50


def test_programs_change_chunks_of_one_storage_in_place() -> None:
    def changes_a_chunk(program: Program) -> bool:
        steps = steps_of(program.body)
        chunks = {out for step in steps if isinstance(step, Chunks) for out in step.outs}
        return any(isinstance(step, Write) and step.operands[0] in chunks for step in steps)

    assert sum(changes_a_chunk(program_of(seed)) for seed in range(200)) > 40


def test_programs_change_nothing_that_a_region_inside_hooks_that_copy_made() -> None:
    """There the plain run accepts what autograd refuses without those hooks."""

    def covered(body: tuple[Step, ...], copied: bool) -> list[Region]:
        found = []
        for step in body:
            if isinstance(step, Region) and copied:
                found.append(step)
            is_copying = isinstance(step, Block) and step.context == "save_on_cpu()"
            found += covered(getattr(step, "body", ()), copied or is_copying)
        return found

    seen = 0
    for program in map(program_of, range(1500)):
        for region in covered(program.body, copied=False):
            seen += 1
            writes = [step for step in steps_of(program.body) if isinstance(step, Write)]
            inside = [step for step in steps_of(region.body) if isinstance(step, Write)]
            assert not inside
            assert not {write.operands[0] for write in writes} & set(region.outs)
    assert seen > 20


def test_programs_change_what_a_policy_region_returned_in_another_and_nowhere_else() -> None:
    """So that it is tried; elsewhere it is an error, as documented."""

    def written_after(body: tuple[Step, ...], recorded: bool) -> set[bool]:
        found, outs = set(), set()
        for step in body:
            if isinstance(step, Region):
                found |= written_after(step.body, recorded=True)
                outs |= set(step.outs)
            elif isinstance(step, Write) and step.operands[0] in outs:
                found.add(recorded)
        return found

    modes = {"keep nothing": MODES["keep nothing"]}
    found = [written_after(program_of(seed, modes).body, False) for seed in range(1000)]
    assert set().union(*found) == {True}


def test_each_mode_ends_a_few_programs_as_the_plain_run_does() -> None:
    batch = look_at(range(2), list(WAYS), "cpu")
    assert batch.failures == ()
    assert {batch.counts[name, "programs"] for name in WAYS} == {2}


@pytest.mark.parametrize(("run", "kind"), [(careless, "wrong"), (broken, "errors")])
def test_a_mode_that_is_wrong_or_raises_is_found_and_counted(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any], kind: str
) -> None:
    monkeypatch.setitem(WAYS, "bad", Way({"bad": Mode(run)}))
    batch = look_at(range(40), ["default", "bad"], "cpu")
    assert {(failure.way, failure.kind) for failure in batch.failures} == {("bad", kind)}
    assert len(batch.failures) == batch.counts["bad", kind] > 0
    assert batch.counts["bad", "skipped"] == batch.counts["default", "skipped"] > 0


def test_a_failure_is_shown_with_the_line_that_runs_it_again() -> None:
    shown = format_failure(Failure("whole, spilled", 7, "wrong", "the program"), "cpu")
    assert shown.splitlines() == [
        "--- whole, spilled, seed 7: wrong",
        "python -m tests.programs.hunt --mode 'whole, spilled' --first 7 --count 1 --workers 1",
        "the program",
    ]


def test_counts_are_a_table_with_a_line_for_each_mode() -> None:
    counts = Counter({("one", "programs"): 12, ("one", "wrong"): 3, ("another", "skipped"): 4})
    assert format_counts(["one", "another"], counts, 5.2).splitlines()[:3] == [
        "mode     programs     wrong    errors   skipped",
        "one            12         3         0         0",
        "another         0         0         0         4",
    ]


@pytest.mark.parametrize(("counts", "ends_well"), [({}, True), ({("default", "wrong"): 1}, False)])
def test_the_exit_status_tells_whether_any_program_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    counts: dict[tuple[str, str], int],
    ends_well: bool,
) -> None:
    class Pool:
        """Runs what it is given at once, and says that it found so much."""

        def __init__(self, *args: Any) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def submit(self, function: Any, seeds: range, names: list[str], device: str) -> Any:
            done: hunting.Future[Batch] = hunting.Future()
            found = Counter(dict.fromkeys([("default", "programs")], len(seeds)) | counts)
            done.set_result(Batch(found, ()))
            return done

    monkeypatch.setattr(hunting, "ProcessPoolExecutor", Pool)
    assert hunting.hunt(["default"], 0, 50, float("inf"), 2, "cpu") is ends_well
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["default", "50"]
