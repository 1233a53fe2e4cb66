from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.run.rows import lessons_of
from tests.config.values import config_of
from tests.trainer.rollouts import row_of

MIXED = (
    *("data.task=null", "eval.every_num_steps=0", "algorithm.teacher_path=initial"),
    "algorithm.by_source={a: {advantage: distillation}}",
    "algorithm.old_logprobs=recompute",
)


@pytest.mark.parametrize(("coefficient", "numbers"), [(0, [0, -1, 0]), (1, [0, 0, 0])])
def test_rows_that_nothing_compares_with_a_teacher_have_none(
    tmp_path: Path, coefficient: int, numbers: list[int]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1", "answer": "1"}))
    sources = ", ".join(f"{source}: {{files: ['{file}']}}" for source in "ab")
    config = config_of(
        *(*MIXED, f"data.sources={{{sources}}}"), f"algorithm.divergence_coefficient={coefficient}"
    )
    lessons = lessons_of(config, build_starter_tokenizer())
    assert lessons is not None
    rows = [row_of(n, source=source) for n, source in enumerate("aba")]
    assert lessons.columns(rows)["teacher_P"].tolist() == numbers
