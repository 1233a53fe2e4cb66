from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.errors import WorkerDiedError
from tests.end_to_end import runs
from tests.end_to_end.runs import STAND_INS
from tests.end_to_end.small import VARIED, read_metrics
from tests.end_to_end.test_faults import run_into

MEGATRON = (
    "actor=megatron",
    "cluster.num_ranks_per_node=2",
    STAND_INS,
    "model.starter.num_layers=2",
)
TENSOR = "megatron.tensor_parallel_size=2"
PIPELINE = "megatron.pipeline_parallel_size=2"
SEQUENCE = "megatron.sequence_parallel=true"
NUM_STEPS = 40  # of the default 100; the mean reward of a step goes 0.3 -> 0.5 here


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    return runs.train(folder, *MEGATRON, VARIED, "actor.optimizer.lr=1e-2", *overrides)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_default_task_is_learnt_over_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "hybridrl.main", "recipes=cpu/megatron", "tracking.live=off"),
        *(f"trainer.run_dir={tmp_path / 'run'}", f"trainer.num_steps={NUM_STEPS}"),
        *(f"eval.every_num_steps={NUM_STEPS}", "checkpoint.every_num_steps=0"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [m["reward/mean"] for m in read_metrics(tmp_path / "run") if "reward/mean" in m]
    assert fmean(rewards[-15:]) > fmean(rewards[:10]) + 0.05


@pytest.mark.shows("6.2")
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_sleeps_resumes_and_goes_on_cut_in_another_way(tmp_path: Path) -> None:
    """Four steps tensor-parallel with sleeping engines; the last two once more in stages."""
    still = (
        *("rollout.sleep=true", "rollout.canary_max_drift_nats=1e-4", "trainer.num_steps=4"),
        *("checkpoint.every_num_steps=1", "checkpoint.keep_last=9"),
    )
    straight = train(tmp_path / "straight", *still, TENSOR, SEQUENCE)
    folder = runs.go_back_to(2, tmp_path / "straight", tmp_path / "run")
    lines = train(folder, *still, PIPELINE)
    assert [line["policy/updates"] for line in lines[1:]] == [1, 1, 1, 1]
    assert all(line["memory/released_bytes"] > 0 for line in lines[1:])
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-4 for line in lines[1:])
    first, second = ([line["reward/mean"] for line in run[1:]] for run in (lines, straight))
    assert first == second
    one, other = (load_file(of / runs.WEIGHTS) for of in (folder, tmp_path / "straight"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-4, rtol=0)
    (line,) = runs.train(tmp_path / "eval", "mode=eval", f"eval.checkpoint={folder}", VARIED)
    assert line["eval/reward/mean"] == pytest.approx(lines[-1]["eval/reward/mean"])


@pytest.mark.usefixtures("ray_cluster")
def test_ppo_trains_policy_and_critic_in_pipeline_stages_of_one_process(tmp_path: Path) -> None:
    lines = train(
        tmp_path / "run",
        PIPELINE,
        *("algorithm=ppo", "actor=megatron"),
        *("critic.num_warmup_steps=1", "critic.num_minibatches=1", "algorithm.num_minibatches=1"),
        *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1"),
    )
    assert [line.get("critic/updates") for line in lines] == [None, 1, 1, 1]
    assert [line.get("policy/updates") for line in lines] == [None, None, 1, 1]
    assert lines[3]["policy/kl_to_reference_nats/mean"] > 0


@pytest.mark.shows("6.7")
@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_dies_within_a_pipeline_ends_the_run_by_name(tmp_path: Path) -> None:
    error = run_into(tmp_path / "run", *MEGATRON, PIPELINE, at="update", number=signal.SIGKILL)
    assert isinstance(error, WorkerDiedError)
    assert "killed by signal 9" in str(error)
