"""A whole run whose rollout engine is SGLang, started as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from hybridrl.env import ROOT
from tests.end_to_end.small import SMALL, read_metrics

NUM_STEPS = 40  # of the default 100; the mean reward of a step goes 0.33 -> 0.47 here
TIMEOUT_S = 400  # 25 s of CPU for the server, 1 to 2 s a step


# One server for both ranks, as they share a model.
MEGATRON = ("recipes=cpu/megatron", "rollout.tensor_parallel_size=2")


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("overrides", [(), MEGATRON], ids=["fsdp2", "megatron-tp2"])
def test_the_default_task_is_learnt_on_sglang_and_no_process_is_left(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    lines = run_on_sglang(tmp_path, *overrides, num_steps=NUM_STEPS)
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    # Not the evaluation, whose 128 greedy answers go up and down by more than that.
    assert fmean(rewards[-15:]) > fmean(rewards[:10]) + 0.05


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_conversations_are_learnt_on_sglang(tmp_path: Path) -> None:
    lines = run_on_sglang(tmp_path, "recipes=cpu/calculator", num_steps=40)
    steps = [line for line in lines if "agent/turns/mean" in line]
    rewards = [step["reward/mean"] for step in steps]
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.2  # 0.34 -> 0.85
    assert steps[-1]["agent/tool_calls/mean"] > 0.8  # from 0.3: it has learnt to call the tool


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.shows("4.1")
@pytest.mark.parametrize(
    "task",
    [
        ("serving.router=sglang",),
        ("recipes=cpu/calculator", "serving.router=sglang"),
        ("recipes=cpu/calculator", "serving.weights=broadcast"),
    ],
    ids=["digits-router", "agent-router", "agent-broadcast"],
)
def test_two_servers_agree_with_the_trainer(tmp_path: Path, task: tuple[str, ...]) -> None:
    small = [override for override in SMALL if override.startswith("model.")]
    lines = run_on_sglang(tmp_path, *small, "serving=own", *task, num_steps=2)
    steps = [line for line in lines if "loss/policy" in line]
    assert [line["rollout/repeated_requests"] for line in steps] == [0, 0]
    for line in steps if "serving.router=sglang" in task else ():
        assert line["rollout/router_restarts"] == line["rollout/unanswered_routed_requests"] == 0
        assert line["rollout/routed_requests"] > 0
        assert line["time/routed_request_s"] > 0


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_short_run_on_sglang_agrees_with_its_trainer(
    tmp_path: Path,
) -> None:
    small = [override for override in SMALL if override.startswith("model.")]
    small += ["trainer.num_prompts_per_step=4", "eval.num_prompts=4"]
    run_on_sglang(tmp_path, *small, num_steps=3)


def run_on_sglang(folder: Path, *overrides: str, num_steps: int) -> list[dict[str, float]]:
    """Run the command; check what holds of every run on SGLang, and return its metrics."""
    evaluated = (f"eval.every_num_steps={num_steps}", "checkpoint.every_num_steps=0")
    lines = require_agreement(folder, *overrides, *evaluated, num_steps=num_steps)
    hits = [line["rollout/prefix_cache_hit_fraction"] for line in lines[2:]]
    assert min(hits) > 0.8  # a group's prompt is computed once; before, an evaluation counts too
    return lines


def require_agreement(
    folder: Path, *overrides: str, num_steps: int, timeout_s: float = TIMEOUT_S
) -> list[dict[str, float]]:
    """Run the command; check that it agrees with its trainer and ends its servers."""
    lines = run_command(folder, *overrides, num_steps=num_steps, timeout_s=timeout_s)
    mismatch = "policy/sampler_mismatch_nats/max"
    assert len([line for line in lines if line.get(mismatch, 1.0) < 1e-3]) == num_steps
    return lines


def run_command(
    folder: Path, *overrides: str, num_steps: int, timeout_s: float
) -> list[dict[str, float]]:
    """Run the command; check that it ends well and with its servers; return its metrics."""
    command = [
        *(sys.executable, "-m", "hybridrl.main", "rollout=sglang", "tracking.live=off"),
        *("rollout.start_timeout_s=150", "cluster.start_timeout_s=160", *overrides),
        *(f"trainer.run_dir={folder / 'run'}", f"trainer.num_steps={num_steps}"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # stand-ins lie in the test tree
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert servers_started_in(folder) == []
    return read_metrics(folder / "run")


def servers_started_in(folder: Path) -> list[str]:
    """The processes of SGLang that came from a command in this folder; they name themselves."""
    return [process.info["name"] for process in processes_of(folder, "sglang::")]


def processes_of(folder: Path, prefix: str) -> list[psutil.Process]:
    """The processes with such a name that came from a command in this folder."""
    return [
        process
        for process in psutil.process_iter(["name", "cwd"])
        if (process.info["name"] or "").startswith(prefix) and process.info["cwd"] == str(folder)
    ]
