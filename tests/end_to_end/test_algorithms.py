"""Every algorithm of hydra_configs/algorithm takes its steps, through real workers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hybridrl.env import ROOT
from tests.end_to_end.runs import train
from tests.end_to_end.small import VARIED

pytestmark = pytest.mark.usefixtures("ray_cluster")

ALGORITHMS = sorted(file.stem for file in (ROOT / "hydra_configs/algorithm").glob("*.yaml"))
# One for each part that a step may have: a critic, a critic by turns, a greedy baseline, a teacher,
# groups sampled again, weights of the sampler, covariances, several rewards, a token baseline.
BY_DAY = {
    *("grpo", "ppo", "turn_ppo", "remax", "distillation", "dapo", "bypass_pg_is", "clip_cov"),
    *("gdpo", "optimal_token_baseline"),
}
OWN = """
from typing import Annotated

from pydantic import Field


def centred(rewards_B, *, scale: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0):
    return (rewards_B - rewards_B.mean()) * scale


def plain(current_logprobs_T, advantages_T):
    return -advantages_T * current_logprobs_T
"""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    _train(folder, "trainer.num_steps=1")
    return folder / "hf"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly)
        for name in ALGORITHMS
    ],
)
def test_an_algorithm_takes_its_steps(name: str, tmp_path: Path, teacher: Path) -> None:
    given = [f"algorithm.teacher_path={teacher}"] if name == "distillation" else []
    steps = _train(tmp_path / "run", f"algorithm={name}", *given)
    assert all(math.isfinite(step["loss/policy"]) for step in steps)
    assert steps[-1]["policy/updates"] > 0
    assert max(step["policy/grad_norm"] for step in steps) > 0


def test_own_parts_are_loaded_by_path_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = [
        f"algorithm.advantage={tmp_path}/own.py:centred",
        "algorithm.advantage_args.scale=2.0",
        f"algorithm.policy_loss={tmp_path}/own.py:plain",
    ]
    steps = _train(tmp_path / "run", *own, "cluster.num_ranks_per_node=2")
    assert max(step["policy/grad_norm"] for step in steps) > 0
    assert [step["policy/ratio/mean"] for step in steps] == pytest.approx([1.0] * len(steps))


def _train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    short = ("trainer.num_steps=2", "eval.every_num_steps=0", "critic.num_warmup_steps=0")
    return train(folder, *short, VARIED, *overrides)
