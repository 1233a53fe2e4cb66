"""Export with the names and shapes of megatron-core's tensors, without megatron-core."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.architecture import read_architecture
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.checkpoint import load_weights
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.export import WeightExport
from hybridrl.workers.train.megatron.shard_map import ShardMap
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.megatron.shards import local_shapes


def _loaded(folder: Path, rank: ParallelRank) -> dict[str, Tensor]:
    architecture = read_architecture(folder)
    shapes = local_shapes(architecture, rank, is_fused=True, lora_rank=0)
    local = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_weights(local, WeightFiles(folder), ShardMap(architecture, rank))
    return local


def _measure_batches(rank: int, folder: Path) -> list[int]:
    parallel = ParallelRank(tp_rank=rank, tp_size=2)
    local = _loaded(folder, parallel)
    sizes = []
    for batch_bytes in (1, 10_000, 2**30):
        export = WeightExport(
            local,
            ShardMap(read_architecture(folder), parallel),
            group=dist.group.WORLD,
            batch_bytes=batch_bytes,
        )
        kept = dict(export.full_weights(local.__getitem__))  # a batch overwrites none before it
        wanted = load_file(folder / "model.safetensors")
        assert all(torch.equal(kept[name], wanted[name]) for name in wanted)
        sizes.append(export.buffer_bytes)
    return sizes


def test_export_buffer_holds_one_batch_or_one_tensor(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors").values()
    matrices = [tensor.nbytes for tensor in tensors if tensor.ndim == 2]
    for alone, some, everything in run_ranks(2, _measure_batches, folder):
        assert alone == max(matrices)
        assert max(matrices) <= some <= 10_000
        assert everything == sum(matrices)  # norms are on every rank, so nobody sends them


def _miss_a_layer(rank: int, folder: Path) -> str:
    parallel = ParallelRank()
    local = _loaded(folder, parallel)
    own = {n: t for n, t in local.items() if rank == 0 and ".layers.1.mlp.linear_fc2" not in n}
    architecture = read_architecture(folder)
    with pytest.raises(ModelError, match=r"do not have all of model.layers.1.mlp.down_proj.weight"):
        WeightExport(own, ShardMap(architecture, parallel), group=dist.group.WORLD)
    half = dataclasses.replace(parallel, tp_rank=1, tp_size=2)
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.q_proj.weight, model.lay"):
        WeightExport(_loaded(folder, half), ShardMap(architecture, half), group=dist.group.WORLD)
    return "both"


def test_missing_shards_are_reported_before_the_first_tensor(tmp_path: Path) -> None:
    assert run_ranks(2, _miss_a_layer, make_tiny_model(tmp_path)) == ["both"] * 2


def test_export_without_a_group_yields_live_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe")
    local = _loaded(folder, ParallelRank())
    flat = torch.cat([tensor.view(-1) for tensor in local.values()])  # as in a gradient buffer
    sizes = [tensor.numel() for tensor in local.values()]
    live = {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(local.items(), flat.split(sizes), strict=True)
    }
    shard_map = ShardMap(read_architecture(folder), ParallelRank())
    export = WeightExport(live, shard_map, group=None)
    assert export.buffer_bytes == 0
    weights = dict(export.full_weights(live.__getitem__))
    down = weights["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert down.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    save_file(weights, tmp_path / "again.safetensors")
    again, wanted = (
        load_file(tmp_path / "again.safetensors"),
        load_file(folder / "model.safetensors"),
    )
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
