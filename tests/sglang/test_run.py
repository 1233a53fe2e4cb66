"""Whole runs whose rollout engine is SGLang, started as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.runs.small import read_metrics, small_overrides

NUM_STEPS = 2


def test_the_default_task_trains_on_sglang_and_leaves_no_process(tmp_path: Path) -> None:
    overrides = small_overrides(
        tmp_path / "run",
        "rollout=sglang",
        "rollout.start_timeout_s=150",
        "cluster.start_timeout_s=150",
        f"trainer.num_steps={NUM_STEPS}",
        "eval.every_num_steps=1",
    )
    before = {process.pid for process in psutil.process_iter()}
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.main", *overrides],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "run")
    mismatches = [line.get("policy/sampler_mismatch_nats/max") for line in lines]
    assert len([m for m in mismatches if m is not None and m < 1e-3]) == NUM_STEPS
    assert [name for pid, name in servers() if pid not in before] == []


def servers() -> list[tuple[int, str]]:
    return [
        (process.pid, process.info["name"])
        for process in psutil.process_iter(["name"])
        if "sglang" in process.info["name"]
    ]
