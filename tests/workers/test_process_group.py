"""Process groups that the start of a worker makes, as they would be made on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from hybridrl.config.experiment import ExperimentConfig
from tests.config.values import config_of
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.test_actor_rollout_worker import start_worker

NUM_RANKS = 4

Split = tuple[int, ...]


def _splits_of_a_start(rank: int, folder: Path, config: ExperimentConfig) -> list[Split]:
    """Start a worker; return the groups for which this rank would split NCCL's communicator.

    By torch's rule for a default group that is bound to a GPU: a member does for a group with NCCL,
    another rank that is asked always.
    """
    splits: list[Split] = []
    make = distributed_c10d._new_group_with_tag

    def record(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        members = tuple(range(NUM_RANKS) if ranks is None else sorted(ranks))
        backend = args[1] if len(args) > 1 else options.get("backend")
        if rank in members:
            is_split = backend != "gloo"
        else:
            is_split = not options.get("use_local_synchronization")
        if is_split:
            splits.append(members)
        return make(ranks, *args, **options)

    distributed_c10d._new_group_with_tag = record
    start_worker(config, folder).close()
    return splits


@pytest.mark.parametrize("actor", ["fsdp2", "two replicas", "megatron"])
def test_all_ranks_would_split_nccls_communicator_for_the_same_groups(
    actor: str, tmp_path: Path
) -> None:
    overrides = {
        "fsdp2": (),
        "two replicas": ("actor.fsdp2.num_replicas=2",),
        "megatron": ("actor=megatron", "megatron.tensor_parallel_size=2"),
    }
    config = config_of(f"cluster.num_ranks_per_node={NUM_RANKS}", *overrides[actor])
    rollout = replace(config.rollout, tensor_parallel_size=2, stage_timeout_s=30.0)
    config = replace(config, rollout=rollout)
    folder = make_tiny_model(tmp_path / "model")
    first, *others = run_ranks(NUM_RANKS, _splits_of_a_start, folder, config)
    assert others == [first] * (NUM_RANKS - 1)
    assert (first != []) == (actor != "fsdp2")
