"""What is said of the files that rows come from."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DataError
from hybridrl.run.loops import load_rows
from hybridrl.run.record import open_record
from hybridrl.run.starter import write_random_model
from hybridrl.run.train import train
from tests.config.values import config_of
from tests.end_to_end.small import small_config

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


def test_a_bad_row_to_evaluate_on_shows_before_workers_start(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    (tmp_path / "eval.jsonl").write_text('{"prompt": "2=", "answer": 2}\n')
    model = tmp_path / "model"
    starter = small_config(tmp_path / "unused").model.starter
    assert starter is not None
    write_random_model(starter, model, seed=0)
    config = small_config(
        tmp_path / "run",
        *("model.starter=null", f"model.path={model}", "data.task=null"),
        *(f"data.train_files=[{tmp_path}/train.jsonl]", f"data.eval_files=[{tmp_path}/eval.jsonl]"),
    )
    with (
        open_record(config, resolved_yaml="") as record,
        pytest.raises(DataError, match=r"eval\.jsonl:1: 'answer' is 2, must be text"),
    ):
        train(config, record=record)
    assert "start workers" not in (tmp_path / "run/log.txt").read_text()
