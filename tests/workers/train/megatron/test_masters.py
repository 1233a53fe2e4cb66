"""float32 masters of a model that computes in bfloat16 are the files' values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.workers.train.shard_spec import full_range, relative_slices
from tests.contract.layouts import Layout
from tests.contract.ranks_under_test import Rank, RanksUnderTest
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import ACTOR

LAYOUTS = [
    Layout(name=name, engine="megatron", num_ranks=2, dp_size=dp_size, megatron=sizes)
    for name, dp_size, sizes in (
        ("tp2", 1, {"tensor_parallel_size": 2}),
        ("pp2", 1, {"pipeline_parallel_size": 2}),
        ("dp2", 2, {}),
    )
]


def _compare(rank: Rank, folder: Path) -> int:
    """Compare this rank's masters with the files; return how many numbers there were."""
    engine = rank.policy(folder, replace(ACTOR, compute_dtype="bfloat16"))
    stored = load_file(folder / "model.safetensors")
    count = 0
    for name, held in engine.checkpoint_tensors().items():
        whole = stored[name.removeprefix("model.hf.")]
        for shard in held.shards:
            expected = whole[relative_slices(shard.spec.range, outer=full_range(whole.shape))]
            assert shard.values.dtype == torch.float32
            assert torch.equal(shard.values, expected), name
            count += shard.values.numel()
    for name, weight in engine.full_weights():
        assert torch.equal(weight, stored[name].bfloat16()), name
    return count


@pytest.mark.parametrize("ranks", LAYOUTS, ids=lambda layout: layout.name, indirect=True)
def test_masters_begin_as_the_values_of_the_files(ranks: RanksUnderTest, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    assert any(not torch.equal(t.bfloat16().float(), t) for t in stored.values())
    counts = ranks.run(_compare, folder)
    assert sum(counts) >= sum(tensor.numel() for tensor in stored.values())
