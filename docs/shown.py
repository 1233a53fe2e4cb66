"""Lists under each promise of behaviours.md and reliability.md the tests that show it.

    python docs/shown.py            write the lists
    python docs/shown.py --check    say what is not as it should be

A test names the promises that it shows: ``@pytest.mark.shows("2.8")``. A promise is a list item
that begins with its number in bold. Where no test can show it yet, its text says so in parentheses
that begin with "later" or "GPU".
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("behaviours.md", "reliability.md")

_PROMISE = re.compile(r"- \*\*(\w+\.\d+)\*\* ")
_SHOWN_BY = "  - `tests/"
_NOT_SHOWN = re.compile(r"\((?:later|GPU)\b")


def main() -> None:
    """Write, or check."""
    tests = tests_by_promise()
    if "--check" in sys.argv[1:]:
        faults = find_faults(tests)
        sys.exit("\n".join(faults) if faults else 0)
    for page in _paths():
        page.write_text(with_tests(page.read_text(encoding="utf-8"), tests), encoding="utf-8")


def find_faults(tests: Mapping[str, list[str]]) -> list[str]:
    """Say which promise no test shows, which mark names no promise, and which page is stale."""
    pages = {page.name: page.read_text(encoding="utf-8") for page in _paths()}
    faults = [
        f"{name} does not list the tests as they are; type: make format"
        for name, text in pages.items()
        if text != with_tests(text, tests)
    ]
    promises = {number: text for page in pages.values() for number, text in promises_of(page)}
    for number, promise in promises.items():
        if number not in tests and not _NOT_SHOWN.search(promise):
            faults.append(f"no test shows promise {number}; mark one with shows({number!r})")
        if number in tests and "(later" in promise:
            faults.append(f"promise {number} says later, and {tests[number][0]} shows it")
    unknown = sorted(set(tests) - set(promises))
    faults += [f"{tests[number][0]} shows {number}, which no page promises" for number in unknown]
    return faults


def tests_by_promise(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Return the tests that show each promise, as ``tests/file.py::name``."""
    tests = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for number in _numbers_of(node):
                    tests[number].append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return dict(tests)


def with_tests(page: str, tests: Mapping[str, list[str]]) -> str:
    """Return a page with the list of tests under each promise written anew."""
    lines: list[str] = []
    number = ""
    for line in [*page.splitlines(), ""]:
        if line.startswith(_SHOWN_BY):
            continue
        goes_on = bool(number) and line.startswith("  ")
        if number and not goes_on:
            lines += [f"  - `{test}`" for test in tests.get(number, [])]
            number = ""
        lines.append(line)
        if promise := _PROMISE.match(line):
            number = promise[1]
    return "\n".join(lines)


def promises_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield number and text of each promise."""
    for match in re.finditer(r"^- \*\*(\w+\.\d+)\*\* (.*(?:\n  .*)*)", page, re.MULTILINE):
        yield match[1], match[2]


def _numbers_of(test: ast.FunctionDef) -> Iterator[str]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
            yield from (ast.literal_eval(number) for number in mark.args)


def _paths() -> list[Path]:
    return [ROOT / "docs" / name for name in PAGES]


if __name__ == "__main__":
    main()
