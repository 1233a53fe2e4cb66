from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hybridrl.env import ROOT
from tests.docs.blocks import blocks_of, commands_of
from tests.end_to_end import runs
from tests.end_to_end.runs import make_teacher, train
from tests.end_to_end.small import VARIED

pytestmark = pytest.mark.usefixtures("ray_cluster")

ALGORITHMS = {file.stem for file in (ROOT / "hydra_configs/algorithm").glob("*.yaml")}
# One for each part that a step may have and no other test has: a greedy baseline, weights of the
# sampler, covariances, several rewards, a token baseline. Critics, teachers and groups that are
# sampled again are below, in test_conversations.py, test_distillation.py and test_resume.py; so are
# the players of rae, who play a game.
BY_DAY = {"remax", "bypass_pg_is", "clip_cov", "gdpo", "optimal_token_baseline"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly)
        for name in sorted(ALGORITHMS - {"rae"})
    ],
)
def test_an_algorithm_takes_its_steps(name: str, tmp_path: Path) -> None:
    taught = name in ("distillation", "gkd")
    given = [f"algorithm.teacher_path={make_teacher(tmp_path)}"] if taught else []
    steps = _train(tmp_path / "run", f"algorithm={name}", *given)
    assert all(math.isfinite(step["loss/policy"]) for step in steps)
    assert [step.get("loss/divergence", 0.0) > 0 for step in steps] == [name == "gkd"] * len(steps)
    assert steps[-1]["policy/updates"] > 0
    assert max(step["policy/grad_norm"] for step in steps) > 0


def _train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    short = ("trainer.num_steps=2", "eval.every_num_steps=0", "critic.num_warmup_steps=0")
    return train(folder, *short, VARIED, *overrides)


PPO = (
    *("algorithm=ppo", "algorithm.num_minibatches=2", "critic.num_warmup_steps=1"),
    *("critic.optimizer.lr=1e-2", "actor.optimizer.lr=1e-2"),
)
WARMED = (
    *("critic.num_warmup_steps=2", "trainer.num_steps=4"),
    *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1"),
    # One answer a prompt: nothing is compared with siblings.
    *("rollout.num_responses_per_prompt=1", "trainer.num_prompts_per_step=16"),
)


def train_ppo(folder: Path, *overrides: str) -> list[dict[str, float]]:
    return runs.train(folder, *PPO, VARIED, *overrides)


@pytest.fixture(scope="module")
def warmed(
    tmp_path_factory: pytest.TempPathFactory, ray_cluster: None
) -> Sequence[Mapping[str, float]]:
    """The metrics of a run with a fused critic, which learns alone for two steps."""
    return train_ppo(tmp_path_factory.mktemp("warmed") / "run", *WARMED)


def test_in_the_warm_up_the_critic_learns_alone_and_then_both_do(
    warmed: Sequence[Mapping[str, float]],
) -> None:
    metrics = warmed
    assert [line.get("critic/updates") for line in metrics] == [None, 4, 4, 4, 4]
    assert [line.get("policy/updates") for line in metrics] == [None, None, None, 2, 2]
    assert metrics[1]["critic/value/mean"] == 0.0  # the head begins as zeros
    assert metrics[2]["critic/value/mean"] != 0.0
    assert metrics[1]["loss/value"] > 0
    assert "reward/zero_variance_group_fraction" not in metrics[3]
    # Step 3 takes two updates: its mean distance is small, but step 4 begins two updates away.
    distances = [metrics[n]["policy/kl_to_reference_nats/mean"] for n in (3, 4)]
    assert 2 * distances[0] < distances[1]


def test_a_critic_on_ranks_of_its_own_learns_what_a_fused_one_does(
    warmed: Sequence[Mapping[str, float]], tmp_path: Path
) -> None:
    apart = train_ppo(tmp_path / "apart", *WARMED, "critic.num_ranks_per_node=2")
    for step in (1, 2, 3):
        for name in ("reward/mean", "critic/value/mean", "critic/return/mean"):
            assert apart[step][name] == pytest.approx(warmed[step][name], rel=1e-3, abs=1e-5), name
        for name in ("loss/value", "critic/grad_norm"):
            assert apart[step][name] == pytest.approx(warmed[step][name], rel=1e-2), name
    assert [line.get("critic/updates") for line in apart] == [None, 4, 4, 4, 4]


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
    awake = train_ppo(tmp_path / "awake", *common)
    asleep = train_ppo(tmp_path / "asleep", *common, "rollout.sleep=true")
    assert asleep[3]["memory/released_bytes"] > 0
    assert awake[1]["reward/kl_charge/mean"] == 0 < awake[3]["reward/kl_charge/mean"]
    for one, other in zip(awake[1:], asleep[1:], strict=True):
        for name in ("reward/mean", "loss/value", "critic/explained_variance"):
            assert one[name] == other[name], name
    runs.assert_same_weights(tmp_path / "awake", tmp_path / "asleep")


README = ROOT / "README.md"
FILE = "mine.py"


def test_a_run_takes_the_functions_of_the_readme_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks_of(README) if block.title == FILE]
    Path(FILE).write_text(block.text)
    (command,) = [words for words in commands_of(README) if FILE in " ".join(words)]
    shown = [word for word in command if "=" in word]
    named = {name for word in shown for name in word.split(f"{FILE}:")[1:]}
    assert len(named) == block.text.count("\ndef ") + block.text.startswith("def ")
    lines = train(Path("run"), *shown, "trainer.num_steps=2", "cluster.num_ranks_per_node=2")
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["policy/ratio/mean"] for line in lines] == pytest.approx([1.0, 1.0])
