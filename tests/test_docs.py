"""The code in the pages runs, and prints what the pages say.

All Python blocks of a page are one program, `train.py`, as if a reader had pasted them one below
the other. A block is run unless `<!-- not run -->` stands above it. What it prints is compared with
the `text` block that follows it, or with its `# →` comments. A page about a library is skipped
where the library is not installed.
"""

import contextlib
import doctest
import io
import linecache
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.figures import pages
from rekindle.compat import patch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LIBRARIES = {
    "how-to/lora": ["peft", "transformers"],
    "integrations/accelerate": ["accelerate"],
    "integrations/lightning": ["lightning"],
    "integrations/peft": ["peft", "transformers"],
    "integrations/transformers": ["transformers", "accelerate"],
}
PROGRAM = "train.py"

_BLOCK = re.compile(
    r"(?P<skip><!-- not run -->\n+)?^```python\n(?P<code>.*?)^```$"
    r"(?:\n+^```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"# → (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of a page: its code, where it begins in the program, and what it should print."""

    code: str
    line: int
    output: str | None


def name_of(page: Path) -> str:
    """`how-to/lora` for docs/how-to/lora.md."""
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks_of(text: str) -> list[Block]:
    blocks: list[Block] = []
    line = 1
    for found in _BLOCK.finditer(text):
        if found["skip"]:
            continue
        code, output = found["code"], found["output"]
        comments = _COMMENT.findall(code)
        if output is None and comments:
            output = "".join(f"{comment}\n" for comment in comments)
        blocks.append(Block(code, line, output))
        line += code.count("\n") + 1
    return blocks


def run(blocks: list[Block]) -> Iterator[tuple[Block, str]]:
    """Run the blocks in one namespace; each with what it printed."""
    program = "\n".join(block.code for block in blocks)
    linecache.cache[PROGRAM] = len(program), None, program.splitlines(keepends=True), PROGRAM
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in blocks:
            code = compile("\n" * (block.line - 1) + block.code, PROGRAM, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
                warnings.filterwarnings("error", "The loss is not in the plan")
                exec(code, names)
            yield block, printed.getvalue()
    finally:
        del linecache.cache[PROGRAM]


def same_output(expected: str, printed: str) -> bool:
    """Line by line, spaces at the end aside; `...` stands for anything."""
    want, got = ("\n".join(map(str.rstrip, text.splitlines())) for text in (expected, printed))
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    """A page may patch torch for good, and seeds as it likes; accelerate knows of no other test."""
    before = torch.get_rng_state()
    if sys.modules.get("accelerate"):
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    torch.set_rng_state(before)
    for each in list(patch._active):
        each.undo()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of Dynamo
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in LIBRARIES.get(name_of(page), []):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)  # trainers and plans write to where they are
    for block, printed in run(blocks_of(page.read_text())):
        if block.output is not None:
            assert same_output(block.output, printed), f"{block.code}\nprints\n{printed}"


def test_blocks_are_found_with_their_output() -> None:
    page = (
        "```python\na = 1\n```\n\n```text\nnothing\n```\n\n"
        "<!-- not run -->\n\n```python\nb\n```\n\n"
        "```python\nprint(a)  # → 1\n```\n"
    )
    assert blocks_of(page) == [
        Block("a = 1\n", 1, "nothing\n"),
        Block("print(a)  # → 1\n", 3, "1\n"),
    ]
    assert [printed for _, printed in run(blocks_of(page))] == ["", "1\n"]


@pytest.mark.parametrize(
    ("expected", "same"), [("a 1 b\n", True), ("a ... b\n", True), ("a 2 b\n", False), ("", False)]
)
def test_output_is_compared(expected: str, same: bool) -> None:
    assert same_output(expected, "a 1 b  \n") is same


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_pages_that_a_page_links_to_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_figures_of_a_page_are_those_of_the_results() -> None:
    """`python -m benchmarks.figures` writes them."""
    for page, figures in pages().items():
        text = page.read_text()
        places = [text.find(part) for part in figures]
        assert -1 not in places, page.name
        assert places == sorted(places), page.name
