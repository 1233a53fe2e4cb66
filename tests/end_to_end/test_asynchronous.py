"""Runs whose engines sample ahead: bounded staleness, no prompt lost or doubled over kills."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hybridrl.run.launch import run
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_STEPS, NUM_PROMPTS = 6, 4
AHEAD = (
    *("serving=own", "rollout.num_slots=4", f"trainer.num_steps={NUM_STEPS}"),
    *("algorithm.rollout_correction=importance", "eval.every_num_steps=4"),
    "tracking.num_samples_per_step=16",
    VARIED,
)


def prompts_of(folder: Path) -> Counter[str]:
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    return Counter(each["prompt"] for each in samples if each["split"] == "train")


@pytest.mark.parametrize(("max_staleness", "on_update"), [(1, "interrupt"), (2, "finish")])
def test_a_run_samples_ahead_within_its_bound(
    max_staleness: int, on_update: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = (f"trainer.max_staleness={max_staleness}", f"serving.on_update={on_update}")
    run(small_config(folder, *AHEAD, *keys), resolved_yaml="")
    lines = [line for line in read_metrics(folder) if line["step"]]
    staleness = [line["rollout/staleness_steps/max"] for line in lines]
    assert staleness[0] == 0
    assert max(staleness) <= max_staleness
    if on_update == "finish":
        assert max(staleness) == max_staleness
