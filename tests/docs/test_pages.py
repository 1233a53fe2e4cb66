"""What pages look like, and what they name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT

SPEC = importlib.util.spec_from_file_location("reflow", ROOT / "docs" / "reflow.py")
assert SPEC is not None
assert SPEC.loader is not None
REFLOW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(REFLOW)
PATH = re.compile(r"`((?:hybridrl|tests|benchmarks|hydra_configs|recipes|docs)/[\w/.-]+\.\w+)`")

PLACEHOLDER = re.compile(r"/[A-Z]+\.")


@pytest.mark.parametrize("page", REFLOW.pages(), ids=lambda page: page.name)
def test_lines_of_a_page_have_at_most_120_characters(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert REFLOW.too_long(text, keep_tables=page.name in REFLOW.TABLES_NAME_TESTS) == []


def test_readme_fits_on_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_files_that_pages_name_exist() -> None:
    named = {
        (page.name, path)
        for page in PAGES
        for path in PATH.findall(page.read_text(encoding="utf-8"))
    }
    named = {(page, path) for page, path in named if not PLACEHOLDER.search(path)}
    assert len(named) > 20
    assert {(page, path) for page, path in named if not (ROOT / path).exists()} == set()


WORDS = "word " * 30


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (f"- {WORDS}\n", f"- {'word ' * 22}word\n  {'word ' * 6}word\n"),
        (f"1. {WORDS}\n", f"1. {'word ' * 22}word\n   {'word ' * 6}word\n"),
        (f"```\n{WORDS}\n```\n", f"```\n{WORDS}\n```\n"),
        (f"# {WORDS}\n", f"# {WORDS}\n"),
        ("short\nlines\n", "short\nlines\n"),
        (
            f"| a | b | c |\n|---|---|---|\n| x | y | {'z' * 120} |\n",
            f"- **x**\n  - b: y\n  - c:\n    {'z' * 120}\n",
        ),
        (f"{'a ' * 59}x - word\n", f"{'a ' * 58}a\nx - word\n"),
    ],
)
def test_long_lines_are_filled_anew_and_marks_stay_marks(text: str, filled: str) -> None:
    assert REFLOW.reflow(text) == filled
    assert REFLOW.reflow(filled) == filled
