from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.errors import ModelError
from hybridrl.models.architecture import Architecture
from hybridrl.planning.split import padded_vocabulary
from hybridrl.workers.train.megatron.architecture import hf_tensors
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.shard_map import (
    LocalShard,
    ShardMap,
    cut_flat,
)
from hybridrl.workers.train.shard_spec import full_range, relative_slices
from tests.drawn import cases
from tests.workers.train.megatron.shards import cut_models, local_shapes, numel

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _slices(shard: LocalShard) -> tuple[slice, ...]:
    return relative_slices(shard.spec.range, outer=full_range(shard.spec.full_shape))


def _replica_of(rank: ParallelRank, name: str) -> tuple[int, int]:
    """Number the replica of a tensor to which a rank belongs."""
    if ".experts." in name:
        return rank.tp_rank, 0  # a tp rank and an etp rank are two names of one process
    return rank.ep_rank, rank.etp_rank


@cases(by_day=25, by_night=300)
@given(cut=cut_models(), is_fused=st.booleans(), lora_rank=st.integers(0, 3))
def test_shards_of_all_ranks_tile_each_tensor_per_replica(
    cut: tuple[Architecture, list[ParallelRank]], is_fused: bool, lora_rank: int
) -> None:
    architecture, ranks = cut
    counts: dict[tuple[str, tuple[int, int]], torch.Tensor] = {}
    copies: dict[tuple[str, tuple[int, int]], int] = {}
    for rank in ranks:
        shapes = local_shapes(architecture, rank, is_fused=is_fused, lora_rank=lora_rank)
        for name, shape in shapes.items():
            end = 0
            for shard in ShardMap(architecture, rank).shards_of(name, shape):
                assert shard.begin == end
                end = shard.end
                key = (shard.name, _replica_of(rank, name))
                count = counts.setdefault(
                    key, torch.zeros(shard.spec.full_shape, dtype=torch.int64)
                )
                count[_slices(shard)] += 1
                copies[key] = max(copies.get(key, 0), int(count.max()))
            assert end == numel(shape) or name in VOCABULARY
    for key, count in counts.items():  # sharded: once; replicated: once per rank
        assert count.min() == count.max() == copies[key], key
        assert copies[key] in (1, ranks[0].tp_size, ranks[0].etp_size), key
    plain = {name: tuple(w.shape) for (name, _), w in counts.items() if ".lora_" not in name}
    assert plain == hf_tensors(architecture)


@settings(max_examples=80)
@given(cut=cut_models(), data=st.data())
def test_pieces_of_a_flat_tensor_cover_its_shards(
    cut: tuple[Architecture, list[ParallelRank]], data: st.DataObject
) -> None:
    architecture, ranks = cut
    rank = data.draw(st.sampled_from(ranks))
    shapes = local_shapes(architecture, rank, is_fused=False, lora_rank=2)
    name = data.draw(st.sampled_from(sorted(shapes)))
    shards = ShardMap(architecture, rank).shards_of(name, shapes[name])
    size = numel(shapes[name])
    inner = data.draw(st.lists(st.integers(0, size), max_size=4))
    edges = sorted({0, size, *inner})
    flat = torch.arange(1.0, size + 1)
    by_shard = {shard.name: torch.zeros(shard.spec.full_shape) for shard in shards}
    by_piece = {name: full.clone() for name, full in by_shard.items()}
    for shard in shards:
        by_shard[shard.name][_slices(shard)] = shard.view(flat)
    elements: Counter[int] = Counter()
    for begin, end in pairwise(edges):
        for piece in cut_flat(shards, begin, end):
            elements.update(range(piece.begin, piece.end))
            by_piece[piece.name][_slices(piece)] = piece.view(flat[begin:end], begin=begin)
    assert set(elements.values()) <= {1}
    assert all(torch.equal(by_shard[n], by_piece[n]) for n in by_shard)


MODEL = Architecture(
    model_type="qwen2",
    num_layers=1,
    hidden_size=8,
    num_heads=4,
    num_key_value_heads=2,
    head_size=2,
    intermediate_size=6,
    vocab_size=10,
    max_positions=16,
    is_tied=True,
    has_qkv_bias=True,
    has_output_bias=False,
    has_mlp_bias=False,
    has_head_norms=False,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    experts=None,
)


def test_vocabulary_padding_belongs_to_no_shard() -> None:
    assert padded_vocabulary(MODEL.vocab_size, tp_size=2) == 16
    name = "embedding.word_embeddings.weight"
    second = ParallelRank(tp_rank=1, tp_size=2)
    (shard,) = ShardMap(MODEL, second).shards_of(name, (8, 8))
    assert (shard.begin, shard.end, shard.spec.range) == (0, 16, ((8, 10), (0, 8)))
    small = dataclasses.replace(MODEL, vocab_size=7)
    assert ShardMap(small, second).shards_of(name, (8, 8)) == ()


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", (1, 1), "no tensor for"),
        ("decoder.layers.1.input_layernorm.weight", (8,), "no tensor for"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (2,), "no tensor for"),
        ("decoder.layers.0.self_attention.linear_qkv.lora.gate_proj.A", (2, 8), "no tensor for"),
        ("decoder.layers.0.mlp.router.weight", (4, 8), "no tensor for"),
        ("decoder.layers.0.mlp.linear_fc2.weight", (8, 6), r"\[8, 6\] on this rank"),
        ("decoder.layers.0.input_layernorm.weight", (9,), r"\[9\] on this rank"),
        ("embedding.word_embeddings.weight", (8, 4), r"\[8, 4\] on this rank"),
    ],
)
def test_unknown_tensors_are_rejected(name: str, shape: tuple[int, ...], problem: str) -> None:
    half = ParallelRank(tp_size=2)
    with pytest.raises(ModelError, match=problem):
        ShardMap(MODEL, half).shards_of(name, shape)
