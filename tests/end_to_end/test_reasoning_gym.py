from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import train

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
pytestmark = pytest.mark.usefixtures("ray_cluster")

SENTENCES = "reasoning_gym:sentence_reordering?size=40&max_words_in_sentence=4&system=none"


def test_a_run_takes_rows_and_rewards_of_a_task(tmp_path: Path) -> None:
    lines = train(
        tmp_path,
        *("data=files", "data.use_chat_template=false", "data.max_prompt_tokens=99"),
        f"data.train_files={json.dumps([SENTENCES])}",
        f"data.eval_files={json.dumps([f'{SENTENCES}&seed=1'])}",
        *("reward.function=reasoning_gym", "trainer.num_steps=2"),
    )
    assert lines[-1]["reward/failed_fraction"] == 0
    # The task gives 0.05 to words in a wrong order, 0 to none.
    assert 0 < lines[-1]["reward/mean"] < 0.051
    assert "eval/reward/mean" in lines[-1]
