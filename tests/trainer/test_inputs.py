"""Rows to evaluate on are read with those to train on: before workers are started."""

from pathlib import Path

import pytest

from hybridrl.errors import DataError
from hybridrl.trainer.build_training import train
from hybridrl.trainer.record import open_record
from hybridrl.trainer.starter import write_random_model
from tests.runs.small import small_config


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
        train(config, model, record=record)
    assert "start workers" not in (tmp_path / "run/log.txt").read_text()
