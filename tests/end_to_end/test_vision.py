from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from hybridrl.data.pixels import read_image
from tests.agents import pictures_file
from tests.end_to_end.runs import (
    WEIGHTS,
    assert_same_weights,
    go_back_to,
    samples_of,
    train,
    turns_of,
)
from tests.end_to_end.small import VARIED, read_metrics

pytestmark = pytest.mark.usefixtures("ray_cluster")


SEEING = (
    *("model=starter_that_sees", "data=read_numbers", "model.freeze_vision=false"),
    *("model.starter.num_warmup_steps=30", "data.max_prompt_tokens=32"),
    *("trainer.num_steps=2", "eval.every_num_steps=0"),
)


def test_a_model_that_sees_learns_on_two_ranks_and_is_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lines = train(
        run,
        *(*SEEING, VARIED, "rollout.sleep=true", "rollout.max_response_tokens=4"),
        *("cluster.num_ranks_per_node=2", "actor.optimizer.lr=1e-2"),
        "rollout.canary_max_drift_nats=1e-3",
    )
    assert [line["policy/updates"] for line in lines] == [1, 1]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    (url,) = samples_of(run)[0]["images"]
    assert read_image(url).height == 28  # two patches of 14 pixels, as the model saw it
    assert [name for name in load_file(run / WEIGHTS) if "visual" in name]
    AutoModelForImageTextToText.from_pretrained(run / "hf")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_recipe_learns_to_read_numbers(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "hybridrl.main", "recipes=cpu/vision", "tracking.live=off"),
        *(f"trainer.run_dir={tmp_path / 'run'}", "eval.num_prompts=256"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=890, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "run")
    rewards = [line["eval/reward/mean"] for line in lines if "eval/reward/mean" in line]
    assert rewards[-1] > rewards[0] + 0.3  # .39 -> .87


def test_conversations_show_an_image_each_turn_and_resume(tmp_path: Path) -> None:
    playing = (
        *(*SEEING, "rollout.temperature=0.5", "rollout.max_response_tokens=64"),
        *("agent=environment", f"agent.environment={pictures_file.__file__}:Digits"),
        *("reward.function=agent", "trainer.num_prompts_per_step=2"),
        "checkpoint.every_num_steps=1",
    )
    whole = tmp_path / "whole"
    lines = train(whole, *playing)
    broken = go_back_to(1, whole, tmp_path / "broken")
    train(broken, *playing)
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-4 for line in lines)
    assert all(line["agent/ended_by_error_fraction"] == 0 for line in lines)
    assert max(line["agent/turns/mean"] for line in lines) > 1.5
    assert max(line["policy/grad_norm"] for line in lines) > 0
    assert_same_weights(whole, broken)
    shown = {turn["text"] for turn in turns_of(whole) if turn["role"] == "user"}
    assert shown == {"u:<|vision_start|><|image_pad|><|vision_end|>=<|end|>a:"}
