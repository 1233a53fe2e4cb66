"""What the documents name exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
LINE = re.compile(r"^\| (\d)\.(\d+) \| ", re.MULTILINE)
LINES_OF_SECTION = {1: 19, 2: 16, 3: 15, 4: 24, 5: 8}

BEHAVIOURS = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")


def test_every_test_that_the_list_of_behaviours_names_exists() -> None:
    missing = [
        f"{file}::{name}"
        for file, name in TEST.findall(BEHAVIOURS)
        if name not in _functions_of(ROOT / file)
    ]
    assert missing == []


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
    assert len(TEST.findall(BEHAVIOURS)) > 60  # the search finds what it is to find
