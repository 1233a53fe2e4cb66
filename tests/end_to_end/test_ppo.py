"""PPO end to end: what a user gets from algorithm=ppo, with the critic in each of its places."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end import runs
from tests.end_to_end.small import VARIED

pytestmark = pytest.mark.usefixtures("ray_cluster")

PPO = (
    "algorithm=ppo",
    "algorithm.num_minibatches=2",
    "critic.num_warmup_steps=1",
    "critic.optimizer.lr=1e-2",
    "actor.optimizer.lr=1e-2",
)


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    return runs.train(folder, *PPO, VARIED, *overrides)


def test_in_the_warm_up_the_critic_learns_alone_and_then_both_do(tmp_path: Path) -> None:
    metrics = train(
        tmp_path / "run",
        "critic.num_warmup_steps=2",
        "trainer.num_steps=4",
        "algorithm.kl.placement=loss",
        "algorithm.kl.coefficient=0.1",
        # One answer a prompt: nothing is compared with siblings.
        "rollout.num_responses_per_prompt=1",
        "trainer.num_prompts_per_step=16",
    )
    assert [line.get("critic/updates") for line in metrics] == [None, 4, 4, 4, 4]
    assert [line.get("policy/updates") for line in metrics] == [None, None, None, 2, 2]
    assert metrics[1]["critic/value/mean"] == 0.0  # the head begins as zeros
    assert metrics[2]["critic/value/mean"] != 0.0
    assert metrics[1]["loss/value"] > 0
    assert "reward/zero_variance_group_fraction" not in metrics[3]
    # Step 3 takes two updates: its mean distance is small, but step 4 begins two updates away.
    distances = [metrics[n]["policy/kl_to_reference_nats/mean"] for n in (3, 4)]
    assert 2 * distances[0] < distances[1]


def test_a_critic_on_ranks_of_its_own_learns_what_a_fused_one_does(tmp_path: Path) -> None:
    fused = train(tmp_path / "fused")
    apart = train(tmp_path / "apart", "critic.num_ranks_per_node=2")
    for step in (1, 2):
        for name in ("reward/mean", "critic/value/mean", "critic/return/mean"):
            assert apart[step][name] == pytest.approx(fused[step][name], rel=1e-3, abs=1e-5), name
        for name in ("loss/value", "critic/grad_norm"):
            assert apart[step][name] == pytest.approx(fused[step][name], rel=1e-2), name
    assert apart[3]["critic/updates"] == fused[3]["critic/updates"] == 4


@pytest.mark.nightly
def test_a_critic_that_leaves_the_device_with_the_policy_trains_what_one_that_stays_does(
    tmp_path: Path,
) -> None:
    # Two ranks, KL charged token by token: three steps and two evaluations are five sleeps.
    common = (
        "cluster.num_ranks_per_node=2",
        "algorithm.kl.placement=reward",
        "algorithm.kl.coefficient=0.1",
    )
    awake = train(tmp_path / "awake", *common)
    asleep = train(tmp_path / "asleep", *common, "rollout.sleep=true")
    assert asleep[3]["memory/released_bytes"] > 0
    assert awake[1]["reward/kl_charge/mean"] == 0 < awake[3]["reward/kl_charge/mean"]
    for one, other in zip(awake[1:], asleep[1:], strict=True):
        for name in ("reward/mean", "loss/value", "critic/explained_variance"):
            assert one[name] == other[name], name
    runs.assert_same_weights(tmp_path / "awake", tmp_path / "asleep")
