"""What pages look like, and what they name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from hybridrl.config.foreign.names import answer_key, foreign_keys
from hybridrl.config.functions.parts import KINDS
from hybridrl.config.load import free_keys, known_keys
from hybridrl.metrics import find_declaration
from tests.docs.blocks import PAGES, ROOT
from tests.test_metrics import AREAS

SPEC = importlib.util.spec_from_file_location("reflow", ROOT / "docs" / "reflow.py")
assert SPEC is not None
assert SPEC.loader is not None
REFLOW = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(REFLOW)
PATH = re.compile(r"`((?:hybridrl|tests|benchmarks|hydra_configs|recipes|docs)/[\w/.-]+\.\w+)`")

KEY = re.compile(r"`\+?([a-z]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`")
METRIC = re.compile(rf"`((?:{'|'.join(AREAS)})/[a-z_/{{}}]+[a-z}}])`")
FILE_ENDINGS = (".md", ".py", ".json", ".jsonl", ".txt", ".safetensors", ".yaml", ".sh")
PLACEHOLDER = re.compile(r"/[A-Z]+\.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_a_page_have_at_most_120_characters(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert REFLOW.too_long(text) == []


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


def test_keys_that_pages_name_exist() -> None:
    known, free = set(known_keys()), tuple(f"{key}." for key in free_keys())
    sections = {key for key in known if "." not in key}
    named = {
        (page.name, key)
        for page in PAGES
        for key in KEY.findall(page.read_text(encoding="utf-8"))
        if key.partition(".")[0] in sections and not key.endswith(FILE_ENDINGS)
    }
    assert len(named) > 100
    assert {(p, key) for p, key in named if key not in known and not key.startswith(free)} == set()


def test_metrics_that_pages_name_are_declared() -> None:
    named = {
        (page.name, name)
        for page in PAGES
        for name in METRIC.findall(page.read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert {(page, name) for page, name in named if find_declaration(name) is None} == set()


def test_each_key_of_the_page_for_newcomers_exists() -> None:
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    last_columns = [line.rsplit("|", 2)[1] for line in text.splitlines() if line.startswith("| ")]
    named = {name for column in last_columns for name in re.findall(r"`([^`]+)`", column)}
    choices = {name for name in named if "=" in name}
    keys = {name for name in named - choices if "." in name}
    assert len(keys) > 35
    assert {key for key in keys if key.rpartition(".")[0] not in free_keys()} <= set(known_keys())
    for choice in choices:
        section, _, name = choice.partition("=")
        assert (ROOT / f"hydra_configs/{section}/{name}.yaml").is_file(), choice
    for key in keys - set(known_keys()):
        kind = next(kind for kind in KINDS if kind.args_key == key.rpartition(".")[0])
        numbers = {name for part in kind.built_in for name in kind.read(part).numbers}
        assert key.rpartition(".")[2] in numbers


def test_each_key_of_others_on_the_page_for_newcomers_is_answered() -> None:
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    first_columns = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    named = {name for column in first_columns for name in re.findall(r"`([\w.-]+)", column)}
    values = {value for by_value in foreign_keys().typed.values() for value in by_value}
    keys = {name for name in named - values if re.fullmatch(r"[a-z.]+[-_][\w.-]*\w", name)}
    assert len(keys) > 100
    unanswered = {key for key in keys if not answer_key(key) and not key.endswith("_")}
    assert unanswered == {"rollout_correction", "train_async.py"}
