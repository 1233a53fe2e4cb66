"""The rows of a run, in the order in which they are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.rows import load_train_rows, within_epochs
from tests.config.values import config_of

TOKENIZER = build_starter_tokenizer()
FILES = ("data.task=null", "eval.every_num_steps=0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, size, prompt in (("a", 3, "prompt"), ("b", 6, "question")):
        rows = [{prompt: f"{name}{n}", "answer": str(n), "level": -n} for n in range(size)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def drawn(num_rows: int, *overrides: str) -> list[str]:
    rows = load_train_rows(config_of(*FILES, *overrides), TOKENIZER)
    return [str(rows.rows[index].row.prompt) for index in rows.sampler.draw(num_rows)]


def test_a_mix_has_columns_and_weights_of_its_own() -> None:
    b = "b: {files: [b.jsonl], prompt_key: question, weight: 3}"
    prompts = drawn(1000, f"data.sources={{a: {{files: [a.jsonl]}}, {b}}}")
    assert sum(prompt.startswith("a") for prompt in prompts) == 250


def test_progress_counts_the_rows() -> None:
    notes: list[str] = []
    config = config_of(*FILES, "data.train_files=[a.jsonl]")
    load_train_rows(config, TOKENIZER, on_progress=notes.append)
    assert notes == ["3 rows"]


def test_a_curriculum_begins_with_easy_or_hard_rows() -> None:
    level = ("data.train_files=[a.jsonl]", "data.difficulty_key=level")
    assert drawn(4, *level, "data.curriculum=easy_first") == ["a2", "a1", "a0", "a2"]
    assert drawn(3, *level, "data.curriculum=hard_first") == ["a0", "a1", "a2"]


@pytest.mark.parametrize(
    ("overrides", "num_steps"),
    [
        (("trainer.num_epochs=2.1", "trainer.num_prompts_per_step=4"), 6),
        (("trainer.num_epochs=0.01",), 1),
        (("trainer.num_epochs=1000", "trainer.num_steps=7"), 7),
        (("mode=sft", "trainer.num_epochs=3", "trainer.num_prompts_per_step=5"), 6),
        ((), 100),
    ],
)
def test_epochs_bound_the_steps(overrides: tuple[str, ...], num_steps: int) -> None:
    assert within_epochs(config_of(*overrides), 10).num_steps == num_steps
