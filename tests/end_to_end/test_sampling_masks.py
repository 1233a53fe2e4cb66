from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.end_to_end.runs import train
from tests.end_to_end.small import VARIED

pytestmark = pytest.mark.usefixtures("ray_cluster")

LEARNING = (
    *("rollout.sampling_masks=true", VARIED, "actor.optimizer.lr=1e-2"),
    *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1"),
)
OF_RANKS = ("cluster.num_ranks_per_node=2", "algorithm.old_logprobs=recompute")
AHEAD = (
    *("serving=own", "trainer.max_staleness=3", "algorithm.rollout_correction=importance"),
    "checkpoint.every_num_steps=1",  # has groups with their masks
)


@pytest.mark.parametrize("engines", [OF_RANKS, AHEAD], ids=["of-ranks", "ahead"])
def test_a_run_learns_with_the_distribution_that_top_k_left(
    tmp_path: Path, engines: tuple[str, ...]
) -> None:
    _, *steps = train(tmp_path / "run", *LEARNING, *engines, "rollout.top_k=3")
    fresh = steps if engines is OF_RANKS else steps[:1]  # of the weights that are trained
    assert max(step["policy/sampler_mismatch_nats/max"] for step in fresh) < 5e-6
    assert all(0.1 < step["policy/entropy_nats/mean"] <= math.log(3) + 1e-6 for step in steps)
    assert steps[-1]["policy/kl_to_reference_nats/mean"] > 1e-5
    assert all(step["policy/grad_norm"] > 0 for step in steps)
