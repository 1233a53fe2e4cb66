"""What megatron-core's distributed optimizer owns, saved under the names of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.mcore.architecture import read_architecture
from hybridrl.workers.train.mcore.blocks import blocks_of
from hybridrl.workers.train.mcore.export import WeightExport
from hybridrl.workers.train.mcore.hf_tensors import hf_tensors
from hybridrl.workers.train.mcore.load import load_weights
from hybridrl.workers.train.mcore.parts import MODEL, Stretch, moment_prefix, named_pieces
from hybridrl.workers.train.places import Part
from hybridrl.workers.train.shard_files import ShardReader, parts_of, write_parts
from tests.megatron.models import build_local_model, global_parameters, this_rank
from tests.models import Family, make_tiny_model
from tests.ranks import run_ranks


def _optimize(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    config = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True)
    return get_megatron_optimizer(config, [wrapped])


def _stretches(optimizer: Any, local: dict[str, Tensor], key: str) -> list[Stretch]:
    names = {parameter: name for name, parameter in local.items()}
    stretches = []
    for part in optimizer.chained_optimizers:
        for parameter in part.model_param_group_index_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            values = part._get_main_param_and_optimizer_states(parameter)[key]
            stretches.append(Stretch(names[parameter], tuple(parameter.shape), owned.start, values))
    return stretches


def _save_what_is_owned(rank: int, folder: Path, target: Path, sizes: dict[str, int]) -> int:
    architecture = read_architecture(folder)
    model = build_local_model(architecture, **sizes)
    local, cut = global_parameters(model), {"architecture": architecture, "parallel": this_rank()}
    optimizer = _optimize(model)
    load_weights(local, WeightFiles(folder), **cut)
    optimizer.reload_model_params()
    for name, parameter in local.items():
        first = blocks_of(name, parameter.shape, **cut)[0].name  # equal for both of tied weights
        parameter.main_grad.fill_(len(first) / 100)
    optimizer.step()
    whole = hf_tensors(architecture)
    pieces = {}
    for prefix, key in ((MODEL, "param"), (moment_prefix("exp_avg"), "exp_avg")):
        pieces |= named_pieces(_stretches(optimizer, local, key), prefix, whole, **cut)
    held = dict(part for name, tensor in pieces.items() for part in parts_of(name, tensor))
    held = {key: Part(part.values.contiguous(), part.place) for key, part in held.items()}
    write_parts(target / f"rank-{rank}.safetensors", held, notes={})
    dist.barrier()
    again = {prefix + n: torch.empty(s) for n, s in whole.items() for prefix in _PREFIXES}
    with ShardReader(target) as reader:
        reader.fill(again)
    before = WeightFiles(folder)
    export = WeightExport(local, group=dist.group.WORLD, **cut)
    for name, tensor in export.full_weights(local):
        assert torch.equal(again[MODEL + name], tensor), name
        assert not torch.equal(tensor, before.read(name, shape=tensor.shape, dtype=tensor.dtype))
        assert again[moment_prefix("exp_avg") + name].all()
    return sum(part.values.numel() for part in held.values())


_PREFIXES = (MODEL, moment_prefix("exp_avg"))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", {"tp": 2, "pp": 1, "ep": 1, "etp": 1}),
        ("qwen3", {"tp": 1, "pp": 2, "ep": 1, "etp": 1}),
        ("qwen3_moe", {"tp": 1, "pp": 1, "ep": 2, "etp": 1}),
    ],
)
def test_owned_stretches_are_all_of_the_model_and_of_its_moments(
    tmp_path: Path, family: Family, sizes: dict[str, int]
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, vocab_size=61)
    num_values = run_ranks(4, _save_what_is_owned, folder, tmp_path, sizes)
    copies = 2 if sizes["pp"] > 1 else 1  # of tied embeddings; norms stand on every rank
    assert sum(num_values) < (1.2 * copies) * 2 * _count(folder)


def _count(folder: Path) -> int:
    return sum(torch.Size(s).numel() for s in hf_tensors(read_architecture(folder)).values())
