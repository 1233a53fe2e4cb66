"""What the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.config.values import values_of

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINE = re.compile(r"^\| (\d)\.(\d+) \| ", re.MULTILINE)
FILE_ENDINGS = (".md", ".py", ".json", ".jsonl", ".txt", ".safetensors")
LINES_OF_SECTION = {1: 19, 2: 16, 3: 15, 4: 24, 5: 8, 6: 9}

KEY = re.compile(r"`([a-z]+(?:\.[a-z_]+)+)(?:=[\w.]+)?`")
LINK = re.compile(r"\]\(([\w-]+\.md)\)")

BEHAVIOURS, RELIABILITY = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("behaviours.md", "reliability.md")
)


@pytest.mark.parametrize(("text", "at_least"), [(BEHAVIOURS, 90), (RELIABILITY, 60)])
def test_every_test_that_a_list_of_promises_names_exists(text: str, at_least: int) -> None:
    named = TEST.findall(text)
    assert len(named) > at_least  # the search finds what it is to find
    missing = [f"{file}::{name}" for file, name in named if name not in _functions_of(ROOT / file)]
    assert missing == []


def test_every_key_and_document_that_the_promises_name_exists() -> None:
    keys = {key for key in KEY.findall(RELIABILITY) if not key.endswith(FILE_ENDINGS)}
    assert len(keys) > 10
    values = values_of()
    assert [key for key in sorted(keys) if not _holds(values, key)] == []
    links = LINK.findall(RELIABILITY)
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_every_promise_says_what_shows_it() -> None:
    promises: list[str] = []
    in_promises = False
    for line in RELIABILITY.splitlines():
        is_head = line.startswith("| promise |")
        in_promises = line.startswith("|") and (in_promises or is_head)
        if in_promises and not is_head and not line.startswith("|---"):
            promises.append(line)
    assert len(promises) > 40
    assert [row for row in promises if not TEST.search(row.rpartition(" | ")[2])] == []


def _holds(values: object, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def _functions_of(path: Path) -> set[str]:
    if not path.exists():
        return set()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_behaviour_has_its_line_and_every_line_says_what_shows_it() -> None:
    lines = [(int(section), int(number)) for section, number in LINE.findall(BEHAVIOURS)]
    expected = [
        (section, number)
        for section, count in LINES_OF_SECTION.items()
        for number in range(1, count + 1)
    ]
    assert lines == expected
    rows = [row for row in BEHAVIOURS.splitlines() if LINE.match(row)]
    assert [row for row in rows if not row.split(" | ")[2].strip(" |")] == []
