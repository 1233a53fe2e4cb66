"""Published figures are those of this code: what can be counted is, the rest says when it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import page
from benchmarks.publish import COMMANDS, MADE_BY, block_of, page_of, table_of

ROOT = Path(__file__).parents[2]


def test_what_can_be_counted_is_what_the_page_says() -> None:
    written = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    assert written == page(), "type: make figures"


def test_recorded_seconds_of_tests_become_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "durations.json"
    record.write_text('{"tests/a": [3, 1.6], "tests/b": [1, 20.0]}')
    monkeypatch.setattr(figures, "DURATIONS", record)
    *_, first, second, last = figures.durations()
    assert (first, second) == ("| `tests/b` | 1 | 20 |", "| `tests/a` | 3 | 2 |")
    assert last == "| in all | 4 | 22 |"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_published_table_says_its_command_commit_and_date(name: str) -> None:
    made = MADE_BY.search(table_of(name))
    assert made and made["command"] == COMMANDS[name], "a table is replaced by its benchmark alone"


def test_no_other_table_stands_among_the_published() -> None:
    page = page_of("dispatch").read_text(encoding="utf-8")
    for name in COMMANDS:
        page = block_of(name).sub("", page)
    assert not [line for line in page.splitlines() if line.startswith("|")]
