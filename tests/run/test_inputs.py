"""What is said of the files that rows come from."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from hybridrl.config.experiment import with_value
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.doctor import find_bad_rows
from hybridrl.run.rows import load_eval_rows
from tests.config.values import config_of

ROW = '{"prompt": "1=", "answer": "1"}\n'


@pytest.mark.parametrize(("name", "is_told"), [("./train.jsonl", True), ("test.jsonl", False)])
def test_evaluating_on_what_is_learnt_from_is_told(
    name: str,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("train.jsonl", "test.jsonl"):
        Path(file).write_text(ROW)
    files = ("data.task=null", "data.train_files=[train.jsonl]", f"data.eval_files=[{name}]")
    config = config_of(*files)
    with caplog.at_level(logging.WARNING):
        load_eval_rows(config, config.eval.own_set(), build_starter_tokenizer())
    assert (f"evaluating on files that are also learnt from: {name}" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("override", "key", "column"),
    [
        ("data.sources={a: {files: [b.jsonl], answer_key: gold}}", "data.sources.a", "gold"),
        ("eval.sets={a: {files: [b.jsonl]}}", "eval.sets.a", "answer"),
    ],
)
def test_a_check_reads_the_rows_of_every_source_and_set(
    override: str, key: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text(ROW)
    Path("b.jsonl").write_text('{"prompt": "1="}')
    files = ["data.eval_files=[train.jsonl]", "data.task=null"]
    files += [] if "sources" in override else ["data.train_files=[train.jsonl]"]
    (error,) = find_bad_rows(config_of(*files, override))
    assert error.key == f"{key}.files"
    assert re.search(rf"b.jsonl:1: has no '{column}'; set data.*answer_key", str(error))


def test_a_check_refuses_prompts_that_are_all_too_long(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "123=", "answer": "1"}\n')
    files = ("data.task=null", f"data.train_files=[{tmp_path}/train.jsonl]")
    config = config_of(*files, "eval.every_num_steps=0", "data.max_prompt_tokens=3")
    (error,) = find_bad_rows(config)
    assert re.search(r"data\.max_prompt_tokens=3.*set.*=4", str(error))
    dropping = with_value(config, "data.overlong_prompts", "drop")
    (error,) = find_bad_rows(dropping)
    assert re.search(r"all 1 prompts are longer .* set it to 4 tokens", str(error))
