"""What the documents name exists."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES_OF_SECTION = {1: 19, 2: 16, 3: 15, 4: 24, 5: 8, 6: 9}

_SPEC = importlib.util.spec_from_file_location("shown", ROOT / "docs" / "shown.py")
assert _SPEC is not None and _SPEC.loader is not None
SHOWN = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(SHOWN)

BEHAVIOURS = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")


def test_every_behaviour_has_its_line() -> None:
    numbers = [number for number, _ in SHOWN.promises_of(BEHAVIOURS)]
    assert numbers == [
        f"{s}.{n}" for s, count in LINES_OF_SECTION.items() for n in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def tests() -> dict[str, list[str]]:
    by_promise: dict[str, list[str]] = SHOWN.tests_by_promise()
    return by_promise


def test_pages_list_the_tests_that_show_each_promise(tests: dict[str, list[str]]) -> None:
    assert SHOWN.find_faults(tests) == []


def test_a_promise_without_a_test_is_a_fault(tests: dict[str, list[str]]) -> None:
    others = {number: names for number, names in tests.items() if number != "1.1"}
    others["9.9"] = ["tests/test_x.py::test_y"]
    assert SHOWN.find_faults(others) == [
        "behaviours.md does not list the tests as they are; type: make format",
        "no test shows promise 1.1; mark one with shows('1.1')",
        "tests/test_x.py::test_y shows 9.9, which no page promises",
    ]
