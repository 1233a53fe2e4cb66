from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.architecture import Architecture
from hybridrl.errors import ModelError
from hybridrl.workers.train.megatron.blocks import (
    Block,
    blocks_of,
    flat_pieces,
    padded_vocab_size,
)
from hybridrl.workers.train.megatron.hf_tensors import hf_tensors
from hybridrl.workers.train.megatron.parallel_rank import ParallelRank
from tests.workers.train.megatron.shards import cut_models, local_shapes, numel

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _of(rank: ParallelRank, name: str) -> tuple[int, int]:
    """Return which replica of a tensor a rank has: ranks with the same answer share one."""
    if ".experts." in name:
        return rank.tp_rank, 0  # a tp rank and an etp rank are two names of one process
    return rank.ep_rank, rank.etp_rank


@settings(deadline=None, max_examples=80)
@given(cut=cut_models(), is_fused=st.booleans(), lora_rank=st.integers(0, 3))
def test_blocks_of_all_ranks_tile_each_tensor_once_for_every_replica(
    cut: tuple[Architecture, list[ParallelRank]], is_fused: bool, lora_rank: int
) -> None:
    architecture, ranks = cut
    counts: dict[tuple[str, tuple[int, int]], torch.Tensor] = {}
    copies: dict[tuple[str, tuple[int, int]], int] = {}
    for rank in ranks:
        shapes = local_shapes(architecture, rank, is_fused=is_fused, lora_rank=lora_rank)
        for name, shape in shapes.items():
            blocks = blocks_of(name, shape, architecture=architecture, parallel=rank)
            row = 0
            for block in blocks:
                assert block.begin == row
                row = block.end
                key = (block.name, _of(rank, name))
                whole = counts.setdefault(key, torch.zeros(block.place.global_shape, dtype=int))
                whole[tuple(slice(b, e) for b, e in block.box)] += 1
                copies[key] = max(copies.get(key, 0), int(whole.max()))
            assert row == shape[0] or name in VOCABULARY
    for key, whole in counts.items():  # cut: once; whole on every rank: as often as there are
        assert whole.min() == whole.max() == copies[key], key
        assert copies[key] in (1, ranks[0].tp_size, ranks[0].etp_size), key
    plain = {name: tuple(w.shape) for (name, _), w in counts.items() if ".lora_" not in name}
    assert plain == hf_tensors(architecture)


@settings(deadline=None, max_examples=80)
@given(cut=cut_models(), data=st.data())
def test_stretches_of_a_flat_tensor_cover_what_its_rows_cover(
    cut: tuple[Architecture, list[ParallelRank]], data: st.DataObject
) -> None:
    architecture, ranks = cut
    rank = data.draw(st.sampled_from(ranks))
    shapes = local_shapes(architecture, rank, is_fused=False, lora_rank=2)
    name = data.draw(st.sampled_from(sorted(shapes)))
    blocks = blocks_of(name, shapes[name], architecture=architecture, parallel=rank)
    size = numel(shapes[name])
    inner = data.draw(st.lists(st.integers(0, size), max_size=4))
    cuts = sorted({0, size, *inner})
    local = torch.arange(1, size + 1).view(shapes[name])
    by_rows = _spread_blocks(blocks, local)
    by_stretches: dict[str, torch.Tensor] = {}
    times: Counter[int] = Counter()
    for begin, end in pairwise(cuts):
        flat = local.view(-1)[begin:end]
        for piece in flat_pieces(blocks, begin, end):
            times.update(range(piece.begin, piece.end))
            values = piece.view(flat, begin=begin)
            box = piece.place.box(piece.shape)
            whole = by_stretches.setdefault(piece.name, torch.zeros(piece.place.global_shape))
            whole[tuple(slice(b, e) for b, e in box)] = values.float()
    assert set(times.values()) <= {1}
    assert by_rows.keys() == by_stretches.keys()
    assert all(torch.equal(by_rows[n], by_stretches[n]) for n in by_rows)


def _spread_blocks(blocks: tuple[Block, ...], local: torch.Tensor) -> dict[str, torch.Tensor]:
    wholes: dict[str, torch.Tensor] = {}
    for block in blocks:
        whole = wholes.setdefault(block.name, torch.zeros(block.place.global_shape))
        whole[tuple(slice(b, e) for b, e in block.box)] = local[block.begin : block.end].float()
    return wholes


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


def _rows(name: str, shape: tuple[int, ...], rank: ParallelRank) -> list[tuple[str, int, int]]:
    blocks = blocks_of(name, shape, architecture=MODEL, parallel=rank)
    return [(block.name.split(".", 3)[-1], *block.box[0]) for block in blocks]


def test_queries_keys_and_values_lie_group_by_group() -> None:
    second = ParallelRank(tp_rank=1, tp_size=2)
    assert _rows("decoder.layers.0.self_attention.linear_qkv.bias", (8,), second) == [
        ("self_attn.q_proj.bias", 4, 8),
        ("self_attn.k_proj.bias", 2, 4),
        ("self_attn.v_proj.bias", 2, 4),
    ]


def test_a_rank_has_its_part_of_the_gate_above_its_part_of_the_rest() -> None:
    second = ParallelRank(tp_rank=1, tp_size=2)
    assert _rows("decoder.layers.0.mlp.linear_fc1.weight", (6, 8), second) == [
        ("mlp.gate_proj.weight", 3, 6),
        ("mlp.up_proj.weight", 3, 6),
    ]


def test_padding_of_the_vocabulary_belongs_to_no_block() -> None:
    assert padded_vocab_size(MODEL, tp_size=2) == 16
    name = "embedding.word_embeddings.weight"
    second = ParallelRank(tp_rank=1, tp_size=2)
    (block,) = blocks_of(name, (8, 8), architecture=MODEL, parallel=second)
    assert (block.begin, block.end, block.box) == (0, 2, ((8, 10), (0, 8)))
    small = dataclasses.replace(MODEL, vocab_size=7)
    assert blocks_of(name, (8, 8), architecture=small, parallel=second) == ()


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", (1, 1), "known to belong"),
        ("decoder.layers.1.input_layernorm.weight", (8,), "known to belong"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (2,), "known to belong"),
        ("decoder.layers.0.self_attention.linear_qkv.lora.gate_proj.A", (2, 8), "known to belong"),
        ("decoder.layers.0.mlp.router.weight", (4, 8), "known to belong"),
        ("decoder.layers.0.mlp.linear_fc2.weight", (8, 6), r"\[8, 6\] on this rank"),
        ("decoder.layers.0.input_layernorm.weight", (9,), r"\[9\] on this rank"),
        ("embedding.word_embeddings.weight", (8, 4), r"\[8, 4\] on this rank"),
    ],
)
def test_what_the_files_know_nothing_of_is_refused(
    name: str, shape: tuple[int, ...], problem: str
) -> None:
    half = ParallelRank(tp_size=2)
    with pytest.raises(ModelError, match=problem):
        blocks_of(name, shape, architecture=MODEL, parallel=half)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ModelError, match=r"6 rows, columns or experts of a layer.*4 ranks"):
        blocks_of(
            "decoder.layers.0.mlp.linear_fc1.weight",
            (3, 8),
            architecture=MODEL,
            parallel=ParallelRank(tp_size=4),
        )
