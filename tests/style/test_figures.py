"""Published figures are those of this code: what can be counted is, the rest says when it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figure_stamps import (
    FIGURES,
    Block,
    Figures,
    digest_of,
    find_all_faults,
    find_faults,
    put,
)
from benchmarks.figures import page

ROOT = Path(__file__).parents[2]
TEXT = "`python -m benchmarks.gae` at commit 0123abc on 2026-01-31:\n\n| a |\n|---|\n"


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


@pytest.fixture(scope="module")
def faults() -> list[str]:
    return find_all_faults()


def test_no_published_table_is_older_than_what_it_measures(faults: list[str]) -> None:
    assert faults == []


def test_every_published_table_has_its_place_on_the_page(faults: list[str]) -> None:
    assert [fault for fault in faults if "older than" not in fault] == []


def test_every_published_table_measures_sources_that_exist() -> None:
    globs = [pattern for one in FIGURES for pattern in one.measured]
    assert [pattern for pattern in globs if not list(ROOT.glob(pattern))] == []


@pytest.fixture
def measured(tmp_path: Path) -> Figures:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "gae.py").write_text("print(1)\n")
    (tmp_path / "source.py").write_text('"""Words."""\nSPEED = 1\n')
    return Figures(name="gae", measured=("source.py",))


def test_a_table_is_stale_when_a_source_means_something_else(
    measured: Figures, tmp_path: Path
) -> None:
    text = put(
        "<!-- figures gae pending -->\n<!-- end of figures -->\n",
        Block("gae", measured.digest(tmp_path), TEXT),
    )
    assert find_faults(text, [measured], tmp_path) == []
    (tmp_path / "source.py").write_text('"""Other words."""\nSPEED = 1  # why\n')
    assert find_faults(text, [measured], tmp_path) == []
    (tmp_path / "source.py").write_text("SPEED = 2\n")
    assert find_faults(text, [measured], tmp_path) == [
        "gae: its table is older than what it measures; type: python -m benchmarks.publish gae"
    ]


def test_comments_of_yaml_do_not_count_and_values_do(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    digests = []
    for text in ("# why\nlr: 1e-5\n", "lr: 1e-5 # a third\n", "lr: 3e-5\n"):
        recipe.write_text(text)
        digests.append(digest_of("train", ["recipe.yaml"], tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_a_table_without_command_or_outside_a_stamp_is_a_fault(
    measured: Figures, tmp_path: Path
) -> None:
    page_text = "<!-- figures gae pending -->\n<!-- end of figures -->\n| a |\n"
    text = put(page_text, Block("gae", measured.digest(tmp_path), "| a |\n"))
    faults = " ".join(find_faults(text, [measured], tmp_path))
    assert "lacks command, commit and date" in faults
    assert "stands outside" in faults
