"""Prediction against measurement in a real run, and what the command line says beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.run.launch import run
from tests.end_to_end.small import read_metrics, small_config

TOLERANCE = 0.35
"""malloc's heap and first-touched libraries are not to be foretold to the MiB; docs/memory.md."""


@pytest.mark.shows("R10.1")
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_takes_the_memory_that_its_plan_says(tmp_path: Path) -> None:
    config = small_config(
        tmp_path / "run",
        "model.starter.hidden_size=256",
        "model.starter.num_layers=4",
        "model.starter.num_attention_heads=8",
        "model.starter.intermediate_size=1024",
        "model.starter.max_position_embeddings=160",
        "model.starter.num_warmup_steps=0",
        "rollout.max_response_tokens=120",
        "rollout.num_slots=32",
        "rollout.num_responses_per_prompt=8",
        "trainer.num_steps=2",
        "trainer.export_hf=false",
        "eval.every_num_steps=0",
    )
    run(config, resolved_yaml="")
    settled = read_metrics(tmp_path / "run")[-1]
    assert abs(settled["memory/update_plan_error_fraction"]) < TOLERANCE, settled
    assert settled["memory/update_peak_bytes/max"] > 200 * 2**20
    text = (tmp_path / "run" / "log.txt").read_text()
    assert text.count("memory of a rank in the first step: ") == 1
    assert text.count("memory of a rank: ") == 1
