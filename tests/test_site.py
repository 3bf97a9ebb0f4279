"""The site of `scripts/docs`: it builds, and what people look for is found."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle

ROOT = Path(__file__).parents[1]
LOOKED_FOR = {
    "oom": "how-to/oom/",
    "out of memory": "how-to/oom/",
    "gradient checkpointing": "reference/keywords/",
    "qlora": "how-to/lora/",
    "fully_shard": "how-to/fsdp2/",
    "fullgraph": "compile/",
    "rematerialization": "reference/keywords/",
    "selective activation checkpointing": "reference/keywords/",
    "deepspeed": "",
}
"""A word, and a page that has to be among those that a search for it finds."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("material", "mkdocstrings_handlers"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def found(site: Path) -> dict[str, str]:
    """The text that a search looks through, by location: pages, and sections of pages."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    return {entry["location"]: f"{entry['title']} {entry['text']}" for entry in index["docs"]}


@pytest.mark.parametrize("word", LOOKED_FOR)
def test_a_search_finds(word: str, found: dict[str, str]) -> None:
    pages = {where.partition("#")[0] for where, text in found.items() if word in text.lower()}
    assert LOOKED_FOR[word] in pages


def test_every_public_name_has_one_entry_in_the_reference(found: dict[str, str]) -> None:
    entries = [where.partition("#")[2] for where in found if where.startswith("reference/")]
    for name in rekindle.__all__:
        assert entries.count(f"rekindle.{name}") == 1, f"put `::: rekindle.{name}` on a page"


def test_every_public_name_is_listed_with_a_link_to_its_entry(site: Path) -> None:
    page = (site / "reference" / "index.html").read_text()
    assert all(f'#rekindle.{name}"' in page for name in rekindle.__all__)


def test_doctests_of_docstrings_are_blocks_of_code(site: Path) -> None:
    page = (site / "reference" / "planning" / "index.html").read_text()
    assert "<blockquote>" not in page
    assert page.count("&gt;&gt;&gt;") == page.count('<span class="gp">&gt;&gt;&gt; </span>') > 20


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text()
        )
        assert fetched == [], page


def comparison(page: Path) -> str:
    text = page.read_text()
    return text[text.index("<!-- comparison -->") : text.index("<!-- comparison end -->")]


def test_the_comparison_of_the_readme_is_that_of_the_home_page() -> None:
    in_readme = comparison(ROOT / "README.md").replace("](docs/", "](")
    assert in_readme == comparison(ROOT / "docs" / "index.md")
