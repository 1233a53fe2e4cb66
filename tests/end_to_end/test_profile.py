from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import train

pytestmark = pytest.mark.usefixtures("ray_cluster")

PPO = ("algorithm=ppo", "critic.num_warmup_steps=0", "rollout.num_responses_per_prompt=1")


def names_in(file: Path) -> list[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event.get("name", "") for event in events]


def test_each_rank_profiles_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "cluster.num_ranks_per_node=2", "trainer.profile_steps=[1, 3]")
    files = sorted((run / "profile").iterdir())
    assert [file.name for file in files] == [
        f"step-{step}.ActorRolloutWorker.rank-{rank}.json.gz" for step in (1, 3) for rank in (0, 1)
    ]
    for file in files:
        names = names_in(file)
        assert names.count("update") == 1  # of this step alone, by the name of our stage
        assert "aten::mm" in names or "aten::addmm" in names


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_critic_is_profiled_with_the_policy_or_beside_it(tmp_path: Path, is_fused: bool) -> None:
    run = tmp_path / "run"
    pool = () if is_fused else ("critic.num_ranks_per_node=1",)
    train(run, *PPO, *pool, "trainer.num_steps=2", "trainer.profile_steps=[2]")
    roles = sorted(file.name.split(".")[1] for file in (run / "profile").iterdir())
    assert roles == ["ActorRolloutWorker"] + ["CriticWorker"] * (not is_fused)
