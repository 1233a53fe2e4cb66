from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrl.errors import ModelError
from hybridrl.models.architecture import read_architecture
from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.checkpoint import load_weights
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.shard_map import ShardMap
from tests.tiny_models import make_tiny_model
from tests.workers.train.megatron.shards import local_shapes


def _change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    path = folder / "model.safetensors"
    changed = {**load_file(path), **{name.replace("__", "."): t for name, t in tensors.items()}}
    save_file({n: t for n, t in changed.items() if t is not None}, path, metadata={"format": "pt"})
    return folder


def load_nothing(folder: Path) -> None:
    load_weights({}, WeightFiles(folder), ShardMap(read_architecture(folder), ParallelRank()))


@pytest.mark.shows("6.5")
def test_all_misfit_tensors_are_named(tmp_path: Path) -> None:
    folder = _change(
        make_tiny_model(tmp_path, "qwen3"),
        model__layers__0__self_attn__q_proj__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__2__input_layernorm__weight=torch.zeros(32),
        model__layers__0__self_attn__q_proj__bias=torch.zeros(32),
        model__norm__weight=torch.zeros(31),
    )
    with pytest.raises(ModelError) as raised:
        load_nothing(folder)
    message = str(raised.value)
    assert "2 missing: model.layers.0.self_attn.q_proj.weight, model.layers.1.mlp.up_p" in message
    assert "2 not of this model: model.layers.0.self_attn.q_proj.bias, model.layers.2" in message
    assert (
        "1 of another shape: model.norm.weight is [31], and by config.json it must be [32]"
        in message
    )


def test_copies_of_tied_weights_and_old_frequencies_do_no_harm(tmp_path: Path) -> None:
    extra = {"lm_head__weight": torch.zeros(64, 32), "a__rotary_emb__inv_freq": torch.zeros(4)}
    tied = _change(make_tiny_model(tmp_path / "tied", "llama"), **extra)
    load_nothing(tied)
    untied = make_tiny_model(tmp_path / "untied", "llama", tie_embeddings=False)
    _change(untied, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"1 missing: lm_head.weight"):
        load_nothing(untied)


def test_load_reads_only_the_values_of_the_rank(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    architecture, parallel = read_architecture(folder), ParallelRank(tp_rank=3, tp_size=4)
    num_read: list[int] = []

    class Counting(WeightFiles):
        def read_range(self, name: str, values: object) -> torch.Tensor:
            part = super().read_range(name, values)  # type: ignore[arg-type]
            num_read.append(part.numel())
            return part

    shapes = local_shapes(architecture, parallel, is_fused=False, lora_rank=0)
    local = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_weights(local, Counting(folder), ShardMap(architecture, parallel))
    assert sum(num_read) == sum(tensor.numel() for tensor in local.values())  # 64 needs no padding
