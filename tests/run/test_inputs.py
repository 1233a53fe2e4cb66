"""What is said of the files that rows come from."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.loops import load_rows
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
        load_rows(config, build_starter_tokenizer(), split="eval")
    assert (f"evaluating on files that are also learnt from: {name}" in caplog.text) == is_told
