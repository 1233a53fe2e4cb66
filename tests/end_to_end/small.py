"""Whole runs made small: the default experiment with a model of one layer and few rows."""

from __future__ import annotations

from pathlib import Path

from benchmarks.sides.measure import read_metrics
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from tests.composing import composed

__all__ = ["SMALL", "VARIED", "change_one_bit", "read_metrics", "small_config", "small_overrides"]

SMALL = (
    "model.starter.hidden_size=32",
    "model.starter.num_layers=1",
    "model.starter.num_warmup_steps=4",
    "data.num_task_rows=64",
    "data.max_prompt_tokens=8",
    "rollout.max_response_tokens=6",
    "rollout.num_responses_per_prompt=4",
    "rollout.num_slots=8",
    "trainer.num_prompts_per_step=4",
    "trainer.num_steps=3",
    "eval.num_prompts=6",
    "eval.every_num_steps=2",
    "cluster.num_threads_per_rank=1",
    "cluster.start_timeout_s=150",
    "cluster.call_timeout_s=150",
    "tracking.live=off",
)


VARIED = f"reward.function={Path(__file__).with_name('varied_reward.py')}:varied"
"""The override for a reward that tells the responses of an untrained model apart."""


def small_overrides(folder: Path, *overrides: str) -> list[str]:
    return [*SMALL, f"trainer.run_dir={folder}", *overrides]


def small_config(folder: Path, *overrides: str) -> ExperimentConfig:
    return load_config(composed(f"trainer.run_dir={folder}", *overrides, base=SMALL))


def change_one_bit(path: Path) -> None:
    """Of the first number of a file of a run: weights, metrics or samples."""
    data = bytearray(path.read_bytes())
    if path.suffix == ".safetensors":
        begin = 8 + int.from_bytes(data[:8], "little")
        data[begin] ^= 1
    else:
        at = data.index(b'reward/mean": 0.' if path.stem == "metrics" else b"0.")
        at = data.index(b"0.", at) + 2  # a digit
        data[at] = ord("1") if data[at] != ord("1") else ord("2")
    path.write_bytes(data)
