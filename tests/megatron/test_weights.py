"""Hugging Face files into real GPTModels and out again, whatever they are cut into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.models.load import WeightFiles
from hybridrl.workers.train.megatron.architecture import (
    hf_tensors,
    inverse_frequencies,
    megatron_architecture,
)
from hybridrl.workers.train.megatron.checkpoint import load_weights
from hybridrl.workers.train.megatron.export import WeightExport
from hybridrl.workers.train.megatron.shard_map import ShardMap
from tests.megatron.models import build_local_model, global_parameters, this_rank
from tests.ranks import run_ranks
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.megatron.test_architecture import LLAMA3


def _go_there_and_back(_rank: int, folder: Path, tp: int, pp: int, ep: int, etp: int) -> int:
    architecture = megatron_architecture(folder)
    local = global_parameters(build_local_model(architecture, tp=tp, pp=pp, ep=ep, etp=etp))
    shard_map = ShardMap(architecture, this_rank())
    with torch.no_grad():
        for parameter in local.values():
            parameter.fill_(torch.nan)
    wanted = load_file(folder / "model.safetensors")
    export = WeightExport(local, shard_map, group=dist.group.WORLD, batch_bytes=20_000)
    assert [(spec.name, spec.shape) for spec in export.specs] == [*hf_tensors(architecture).items()]
    for _cycle in range(2):
        load_weights(local, WeightFiles(folder), shard_map)
        for name, parameter in local.items():
            end = max([s.end for s in shard_map.shards_of(name, parameter.shape)], default=0)
            assert not parameter.view(-1)[end:].any()
        names = []
        for spec, (name, tensor) in zip(
            export.specs, export.full_weights(local.__getitem__), strict=True
        ):
            names.append(name)
            assert spec.num_bytes == tensor.nbytes
            assert torch.equal(tensor, wanted[name]), name
        assert set(names) == wanted.keys()
    return sum(parameter.numel() for parameter in local.values())


@pytest.mark.parametrize(
    ("family", "is_tied", "tp", "pp", "ep", "etp"),
    [
        ("qwen2", False, 1, 1, 1, 1),
        ("qwen2", True, 2, 1, 1, 1),
        ("qwen2", True, 2, 2, 1, 1),
        ("qwen3", True, 1, 2, 1, 1),
        ("qwen3", False, 2, 2, 1, 1),
        ("llama", False, 2, 1, 1, 1),
        ("llama", True, 4, 1, 1, 1),
        ("mixtral", False, 1, 1, 2, 1),
        ("qwen2_moe", False, 2, 2, 1, 2),
        ("qwen3_moe", True, 1, 2, 2, 1),
        ("qwen2_moe", True, 2, 1, 2, 1),
    ],
)
def test_files_come_back_bit_by_bit(
    tmp_path: Path, family: Family, is_tied: bool, tp: int, pp: int, ep: int, etp: int
) -> None:
    folder = make_tiny_model(tmp_path, family, tie_embeddings=is_tied, vocab_size=61)
    num_ranks = pp * max(tp, ep * etp)
    sizes = run_ranks(num_ranks, _go_there_and_back, folder, tp, pp, ep, etp)
    if num_ranks > 1:  # nobody holds all of it
        assert max(sizes) < sum(p.numel() for p in load_file(folder / "model.safetensors").values())


def _compute_logits(_rank: int, folder: Path, tp: int) -> Tensor:
    architecture = megatron_architecture(folder)
    model = build_local_model(architecture, tp=tp, pp=1, ep=1, etp=1).eval()
    local = global_parameters(model)
    load_weights(local, WeightFiles(folder), ShardMap(architecture, this_rank()))
    model.rotary_pos_emb.inv_freq = inverse_frequencies(architecture)
    positions = torch.arange(TOKENS.shape[1])[None]
    is_masked = torch.ones(1, 1, *TOKENS.shape[1:] * 2, dtype=torch.bool).triu(1)
    with torch.no_grad():
        own_logits = model(TOKENS, positions, is_masked).contiguous()
    logits = [torch.empty_like(own_logits) for _ in range(tp)]
    dist.all_gather(logits, own_logits)
    return torch.cat(logits, dim=-1)[..., : architecture.vocab_size]


TOKENS = torch.arange(24)[None] * 7 % 61


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mixtral", "qwen2_moe"])
def test_loaded_model_computes_hugging_face_logits(tmp_path: Path, family: Family, tp: int) -> None:
    folder = make_tiny_model(tmp_path, family, tie_embeddings=tp == 1, vocab_size=61)
    if family == "llama":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": LLAMA3}))
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = hf(TOKENS).logits
    for logits in run_ranks(tp, _compute_logits, folder, tp):
        torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=0)
