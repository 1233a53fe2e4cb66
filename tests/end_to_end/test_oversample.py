"""Runs whose phases end before all prompts are answered: the others continue in later ones."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.run.launch import run
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_STEPS, NUM_PROMPTS = 6, 4
OVERRIDES = (
    *("cluster.num_ranks_per_node=2", "actor.max_tokens_per_microbatch=64"),
    *(f"trainer.num_steps={NUM_STEPS}", "eval.every_num_steps=3", "eval.num_prompts=4"),
    *("rollout.oversample=2", "algorithm.rollout_correction=importance"),
    *("rollout.canary_every_steps=1", "rollout.num_slots=6", "rollout.max_response_tokens=12"),
    *("checkpoint.every_num_steps=1", "checkpoint.keep_last=10", VARIED),
    *("tracking.num_samples_per_step=1000", "actor.optimizer.lr=1e-3"),
    # Without these steps hardly a response ends before its limit, and where all end at once none is
    # interrupted.
    "model.starter.num_warmup_steps=40",
)


def learned_by_step(folder: Path) -> list[set[int]]:
    """The indices of the prompts that were learned from, up to each step."""
    store, learned = CheckpointStore(folder / "checkpoints"), []
    for step in range(1, NUM_STEPS + 1):
        sampler = json.loads((store.folder_of(step) / "manifest.json").read_text())["run"][
            "sampler"
        ]
        learned.append(set(range(sampler["num_drawn"])) - set(sampler["open_prompts"]))
    return learned


def learned_once(folder: Path) -> list[str]:
    """The texts of all prompts, sorted; each index was learned from in one step alone."""
    learned = learned_by_step(folder)
    assert [len(indices) for indices in learned] == [
        NUM_PROMPTS * step for step in range(1, NUM_STEPS + 1)
    ]
    assert all(before < after for before, after in pairwise(learned))
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [sample for sample in map(json.loads, lines) if sample["split"] == "train"]
    prompts = [sample["prompt"] for sample in samples]
    assert len(prompts) == NUM_STEPS * NUM_PROMPTS
    return sorted(prompts)


def test_open_prompts_continue_and_are_learned_from_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(small_config(folder, *OVERRIDES), resolved_yaml="")
    prompts = learned_once(folder)
    steps = {int(line["step"]): line for line in read_metrics(folder)}
    is_open = [steps[step]["rollout/open_prompts"] for step in range(1, NUM_STEPS + 1)]
    assert is_open == [NUM_PROMPTS] * (NUM_STEPS - 1) + [0]
    assert steps[1]["rollout/staleness_steps/max"] == 0
    assert max(line.get("rollout/staleness_steps/max", 0) for line in steps.values()) >= 1
    assert sum(line.get("rollout/interrupted_tokens", 0) for line in steps.values()) > 0

    checkpoints = CheckpointStore(folder / "checkpoints")
    for step in range(4, NUM_STEPS + 1):  # as if it had died in step 4
        shutil.rmtree(folder / "checkpoints" / f"step-{step:09}")
    newest = checkpoints.newest()
    assert newest is not None
    assert len(newest.manifest.run.sampler.open_prompts) == NUM_PROMPTS
    shutil.rmtree(folder / "hf")
    run(small_config(folder, *OVERRIDES), resolved_yaml="")
    assert learned_once(folder) == prompts
