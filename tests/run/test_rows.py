"""The rows of a run, in the order in which they are drawn."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.modes.doctor import find_bad_rows
from hybridrl.run.rows import load_eval_rows, load_train_rows, within_epochs
from tests.config.values import config_of

TOKENIZER = build_starter_tokenizer()
ROW = '{"prompt": "1=", "answer": "1"}\n'
FILES = ("data.task=null", "eval.every_num_steps=0")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size, prompt in (("a", 3, "prompt"), ("b", 6, "question")):
        rows = [{prompt: f"{name}{n}", "answer": str(n), "level": -n} for n in range(size)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("train", "test"):
        Path(f"{name}.jsonl").write_text(ROW)
    Path("unanswered.jsonl").write_text('{"prompt": "1="}')
    Path("long.jsonl").write_text('{"prompt": "123=", "answer": "1"}\n')


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


@pytest.mark.parametrize(("name", "is_told"), [("./train.jsonl", True), ("test.jsonl", False)])
def test_evaluating_on_what_is_learnt_from_is_told(
    name: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = ("data.task=null", "data.train_files=[train.jsonl]", f"data.eval_files=[{name}]")
    config = config_of(*files)
    with caplog.at_level(logging.WARNING):
        load_eval_rows(config, config.eval.own_set(), build_starter_tokenizer())
    assert (f"evaluating on files that are also learnt from: {name}" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("override", "key", "column"),
    [
        (
            "data.sources={a: {files: [unanswered.jsonl], answer_key: gold}}",
            "data.sources.a",
            "gold",
        ),
        ("eval.sets={a: {files: [unanswered.jsonl]}}", "eval.sets.a", "answer"),
    ],
)
def test_a_check_reads_the_rows_of_every_source_and_set(
    override: str, key: str, column: str
) -> None:
    files = ["data.eval_files=[train.jsonl]", "data.task=null"]
    files += [] if "sources" in override else ["data.train_files=[train.jsonl]"]
    (error,) = find_bad_rows(config_of(*files, override))
    assert error.key == f"{key}.files"
    assert re.search(rf"unanswered.jsonl:1: has no '{column}'; set data.*answer_key", str(error))


def test_a_check_refuses_prompts_that_are_all_too_long() -> None:
    files = (*FILES, "data.train_files=[long.jsonl]", "data.max_prompt_tokens=3")
    config = config_of(*files)
    (error,) = find_bad_rows(config)
    assert re.search(r"data\.max_prompt_tokens=3.*set.*=4", str(error))
    (error,) = find_bad_rows(config_of(*files, "data.overlong_prompts=drop"))
    assert re.search(r"all 1 prompts are longer .* set it to 4 tokens", str(error))
