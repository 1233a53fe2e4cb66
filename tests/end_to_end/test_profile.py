from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.end_to_end.runs import train

pytestmark = pytest.mark.usefixtures("ray_cluster")

PPO = (
    *("algorithm=ppo", "critic.num_warmup_steps=0"),
    *("rollout.num_responses_per_prompt=1", "critic.num_minibatches=2"),
)


def names_in(file: Path) -> list[str]:
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event.get("name", "") for event in events]


@pytest.mark.parametrize("is_fused", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_each_rank_profiles_the_steps_that_were_asked_for(tmp_path: Path, is_fused: bool) -> None:
    """A fused critic is in the profile of the policy's rank, another one has its own."""
    run = tmp_path / "run"
    pool = () if is_fused else ("critic.num_ranks_per_node=1",)
    train(run, *PPO, *pool, "cluster.num_ranks_per_node=2", "trainer.profile_steps=[1, 3]")
    files = sorted((run / "profile").iterdir())
    ranks = ["ActorRolloutWorker.rank-0", "ActorRolloutWorker.rank-1"]
    ranks += [] if is_fused else ["CriticWorker.rank-0"]
    assert [file.name for file in files] == [
        f"step-{step}.{rank}.json.gz" for step in (1, 3) for rank in ranks
    ]
    for file in files:
        names = names_in(file)
        stages = ["values", "critic_update"] if "CriticWorker" in file.name else ["update"]
        assert [names.count(stage) for stage in stages] == [1] * len(stages)  # of this step alone
        assert "aten::mm" in names or "aten::addmm" in names
