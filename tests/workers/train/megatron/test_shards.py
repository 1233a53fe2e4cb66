from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from hybridrl.errors import ModelError
from hybridrl.models.architecture import Architecture, read_architecture
from hybridrl.models.load import WeightFiles
from hybridrl.planning.split import padded_vocabulary
from hybridrl.workers.train.megatron.architecture import hf_tensors
from hybridrl.workers.train.megatron.checkpoint import load_weights
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.export import WeightExport
from hybridrl.workers.train.megatron.shard_map import (
    LocalShard,
    ShardMap,
    cut_flat,
)
from hybridrl.workers.train.shard_spec import full_range, relative_slices
from tests.drawn import cases
from tests.ranks import run_ranks
from tests.tiny_models import Family, make_tiny_model, tiny_config
from tests.workers.train.engines import assert_same_weights

Shapes = dict[str, tuple[int, ...]]

_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers")
FAMILIES: dict[Family, tuple[str, ...]] = {
    "llama": ("attention_bias", "mlp_bias"),
    "qwen2": (),
    "qwen3": ("attention_bias",),
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "qwen2_moe": (*_EXPERTS, "qkv_bias", "shared_expert_intermediate_size"),
    "qwen3_moe": (*_EXPERTS, "attention_bias"),
}
"""Settings that only they have."""


def shard_map_in(folder: Path, rank: ParallelRank) -> ShardMap:
    return ShardMap(read_architecture(folder), rank, hf_tensors(folder))


def shard_maps_of(config: PretrainedConfig, *ranks: ParallelRank) -> list[ShardMap]:
    with TemporaryDirectory() as name:
        config.save_pretrained(name)
        return [shard_map_in(Path(name), rank) for rank in ranks]


@st.composite
def shared_models(draw: st.DrawFn) -> tuple[PretrainedConfig, list[ParallelRank]]:
    """Draw a model, and all ranks that share a layer of it."""
    tp, ep, etp = (draw(st.sampled_from([1, 2, 4]), label=name) for name in ("tp", "ep", "etp"))
    family: Family = draw(st.sampled_from([*FAMILIES]), "family")
    num_groups = draw(st.sampled_from([1, 2, 4, 8]), "groups")
    num_heads = num_groups * draw(st.integers(1, 3), "queries of a group") * tp
    num_layers = draw(st.integers(1, 3), "layers")
    hidden = draw(st.integers(1, 4), "hidden") * tp
    num_experts = ep * draw(st.integers(1, 2), "experts")
    inner_of_expert = draw(st.integers(1, 3), "inner of an expert") * etp
    settings_of_some: dict[str, Any] = {
        **{name: draw(st.booleans(), name) for name in ("attention_bias", "qkv_bias", "mlp_bias")},
        "num_experts": num_experts,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": inner_of_expert,
        "mlp_only_layers": [*range(draw(st.integers(0, num_layers), "sparse"), num_layers)],
        "shared_expert_intermediate_size": tp * draw(st.integers(1, 2), "inner of the shared"),
    }
    inner = draw(st.integers(1, 4), "inner") * tp
    config = tiny_config(
        family,
        num_layers=num_layers,
        vocab_size=draw(st.integers(1, 40), "vocabulary"),
        hidden_size=hidden * (num_heads if family == "llama" else 1),  # else it is refused
        num_attention_heads=num_heads,
        num_key_value_heads=num_groups,
        tie_embeddings=draw(st.booleans(), "tied"),
        head_dim=2 * draw(st.integers(1, 3), "head") * tp,
        intermediate_size=inner_of_expert if family == "mixtral" else inner,
        sliding_window=None,
        **{name: settings_of_some[name] for name in FAMILIES[family]},
    )
    ranks = [
        ParallelRank(tp_rank=t, tp_size=tp, ep_rank=e, ep_size=ep, etp_rank=x, etp_size=etp)
        for t, e, x in product(range(tp), range(ep), range(etp))
    ]
    return config, ranks


def local_shapes(
    architecture: Architecture, rank: ParallelRank, *, is_fused: bool, lora_rank: int
) -> Shapes:
    """Return the tensors of one rank that has all layers, as megatron-core names them.

    ``is_fused``: as TransformerEngine's layers have them: norms within linear layers, experts
    grouped. ``lora_rank``: of adapters beside all linear layers; 0 for none.
    """
    rows = padded_vocabulary(architecture.vocab_size, tp_size=rank.tp_size) // rank.tp_size
    hidden = architecture.hidden_size
    shapes: Shapes = {"embedding.word_embeddings.weight": (rows, hidden)}
    if not architecture.is_tied:
        shapes["output_layer.weight"] = (rows, hidden)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    for layer in range(architecture.num_layers):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in _layer(architecture, rank, layer, is_fused, lora_rank)
        }
    return shapes


Named = Iterator[tuple[str, tuple[int, ...]]]


def _layer(a: Architecture, rank: ParallelRank, layer: int, is_fused: bool, lora: int) -> Named:
    hidden, is_sparse = a.hidden_size, a.is_sparse(layer)
    first = "self_attention.linear_qkv.layer_norm_weight" if is_fused else "input_layernorm.weight"
    fuses_second = is_fused and not is_sparse
    second = "mlp.linear_fc1.layer_norm_weight" if fuses_second else "pre_mlp_layernorm.weight"
    yield first, (hidden,)
    yield second, (hidden,)
    yield from _attention(a, rank)
    if lora:
        yield from _attention_adapters(a, rank, lora)
    if is_sparse:
        yield from _experts(a, rank, is_fused, lora)
    else:
        yield from _mlp("mlp", "", a, (a.intermediate_size // rank.tp_size, lora))


def _attention(a: Architecture, rank: ParallelRank) -> Named:
    hidden, tp = a.hidden_size, rank.tp_size
    qkv = (a.query_size + 2 * a.key_size) // tp
    yield "self_attention.linear_qkv.weight", (qkv, hidden)
    yield "self_attention.linear_proj.weight", (hidden, a.query_size // tp)
    if a.has_qkv_bias:
        yield "self_attention.linear_qkv.bias", (qkv,)
    if a.has_output_bias:
        yield "self_attention.linear_proj.bias", (hidden,)
    if a.has_head_norms:
        yield "self_attention.q_layernorm.weight", (a.head_size,)
        yield "self_attention.k_layernorm.weight", (a.head_size,)


def _attention_adapters(a: Architecture, rank: ParallelRank, lora: int) -> Named:
    hidden, tp = a.hidden_size, rank.tp_size
    yield "self_attention.linear_proj.lora.o_proj.A", (lora, a.query_size // tp)
    yield "self_attention.linear_proj.lora.o_proj.B", (hidden, lora)
    if a.num_key_value_heads % tp == 0:
        for leaf, outputs in (("q", a.query_size), ("k", a.key_size), ("v", a.key_size)):
            yield f"self_attention.linear_qkv.lora.{leaf}_proj.A", (lora, hidden)
            yield f"self_attention.linear_qkv.lora.{leaf}_proj.B", (outputs // tp, lora)


def _experts(a: Architecture, rank: ParallelRank, is_fused: bool, lora: int) -> Named:
    assert a.experts is not None
    yield "mlp.router.weight", (a.experts.num_experts, a.hidden_size)
    if a.experts.shared_size:
        yield "mlp.shared_experts.gate_weight", (1, a.hidden_size)
        shared = (a.experts.shared_size // rank.tp_size, lora)
        yield from _mlp("mlp.shared_experts", "", a, shared)
    inner = a.experts.intermediate_size // rank.etp_size
    lora *= a.experts.names.gate == "gate_proj"  # others have names that no adapter has
    for local in range(a.experts.num_experts // rank.ep_size):
        module = "mlp.experts" if is_fused else f"mlp.experts.local_experts.{local}"
        yield from _mlp(module, str(local) if is_fused else "", a, (inner, lora))


def _mlp(module: str, suffix: str, a: Architecture, sizes: tuple[int, int]) -> Named:
    inner, lora = sizes
    hidden = a.hidden_size
    yield f"{module}.linear_fc1.weight{suffix}", (2 * inner, hidden)
    yield f"{module}.linear_fc2.weight{suffix}", (hidden, inner)
    if a.has_mlp_bias:
        yield f"{module}.linear_fc1.bias{suffix}", (2 * inner,)
        yield f"{module}.linear_fc2.bias{suffix}", (hidden,)
    if lora:
        for leaf in ("gate_proj", "up_proj"):
            yield f"{module}.linear_fc1.lora.{leaf}.A{suffix}", (lora, hidden)
            yield f"{module}.linear_fc1.lora.{leaf}.B{suffix}", (inner, lora)
        yield f"{module}.linear_fc2.lora.down_proj.A{suffix}", (lora, inner)
        yield f"{module}.linear_fc2.lora.down_proj.B{suffix}", (hidden, lora)


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def _slices(shard: LocalShard) -> tuple[slice, ...]:
    return relative_slices(shard.spec.range, outer=full_range(shard.spec.full_shape))


def _replica_of(rank: ParallelRank, name: str) -> tuple[int, int]:
    """Number the replica of a tensor to which a rank belongs."""
    if ".experts." in name:
        return rank.tp_rank, 0  # a tp rank and an etp rank are two names of one process
    return rank.ep_rank, rank.etp_rank


@cases(by_day=25, by_night=300)
@given(shared=shared_models(), is_fused=st.booleans(), lora_rank=st.integers(0, 3))
def test_shards_of_all_ranks_tile_each_tensor_per_replica(
    shared: tuple[PretrainedConfig, list[ParallelRank]], is_fused: bool, lora_rank: int
) -> None:
    config, ranks = shared
    cut = shard_maps_of(config, *ranks)
    counts: dict[tuple[str, tuple[int, int]], torch.Tensor] = {}
    copies: dict[tuple[str, tuple[int, int]], int] = {}
    for shard_map in cut:
        rank = shard_map.rank
        shapes = local_shapes(shard_map.architecture, rank, is_fused=is_fused, lora_rank=lora_rank)
        for name, shape in shapes.items():
            end = 0
            for shard in shard_map.shards_of(name, shape):
                assert shard.begin == end
                end = shard.end
                key = (shard.name, _replica_of(rank, name))
                count = counts.setdefault(
                    key, torch.zeros(shard.spec.full_shape, dtype=torch.int64)
                )
                count[_slices(shard)] += 1
                copies[key] = max(copies.get(key, 0), int(count.max()))
            assert end == math.prod(shape) or name in VOCABULARY
    for key, count in counts.items():  # sharded: once; replicated: once per rank
        assert count.min() == count.max() == copies[key], key
        assert copies[key] in (1, rank.tp_size, rank.etp_size), key
    plain = {name: tuple(w.shape) for (name, _), w in counts.items() if ".lora_" not in name}
    assert plain == cut[0].tensors


@cases(by_day=40, by_night=300)
@given(shared=shared_models(), data=st.data())
def test_pieces_of_a_flat_tensor_cover_its_shards(
    shared: tuple[PretrainedConfig, list[ParallelRank]], data: st.DataObject
) -> None:
    config, ranks = shared
    (shard_map,) = shard_maps_of(config, data.draw(st.sampled_from(ranks)))
    shapes = local_shapes(shard_map.architecture, shard_map.rank, is_fused=False, lora_rank=2)
    name = data.draw(st.sampled_from(sorted(shapes)))
    shards = shard_map.shards_of(name, shapes[name])
    size = math.prod(shapes[name])
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


def small_config(*, vocab_size: int) -> PretrainedConfig:
    return tiny_config(
        "qwen2",
        num_layers=1,
        vocab_size=vocab_size,
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_embeddings=True,
        intermediate_size=6,
    )


def test_vocabulary_padding_belongs_to_no_shard() -> None:
    assert padded_vocabulary(10, tp_size=2) == 16
    name = "embedding.word_embeddings.weight"
    second = ParallelRank(tp_rank=1, tp_size=2)
    (shard_map,) = shard_maps_of(small_config(vocab_size=10), second)
    (shard,) = shard_map.shards_of(name, (8, 8))
    assert (shard.begin, shard.end, shard.spec.range) == (0, 16, ((8, 10), (0, 8)))
    (shard_map,) = shard_maps_of(small_config(vocab_size=7), second)
    assert shard_map.shards_of(name, (8, 8)) == ()


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
    (half,) = shard_maps_of(small_config(vocab_size=10), ParallelRank(tp_size=2))
    with pytest.raises(ModelError, match=problem):
        half.shards_of(name, shape)


def _loaded(folder: Path, rank: ParallelRank) -> dict[str, Tensor]:
    architecture = read_architecture(folder)
    shapes = local_shapes(architecture, rank, is_fused=True, lora_rank=0)
    local = {name: torch.empty(shape) for name, shape in shapes.items()}
    load_weights(local, WeightFiles(folder), shard_map_in(folder, rank))
    return local


def _measure_batches(rank: int, folder: Path) -> list[int]:
    parallel = ParallelRank(tp_rank=rank, tp_size=2)
    local = _loaded(folder, parallel)
    sizes = []
    for batch_bytes in (1, 10_000, 2**30):
        export = WeightExport(
            local,
            shard_map_in(folder, parallel),
            group=dist.group.WORLD,
            batch_bytes=batch_bytes,
        )
        kept = dict(export.full_weights(local.__getitem__))  # a batch overwrites none before it
        assert_same_weights(kept, load_file(folder / "model.safetensors"))
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
    with pytest.raises(ModelError, match=r"do not have all of model.layers.1.mlp.down_proj.weight"):
        WeightExport(own, shard_map_in(folder, parallel), group=dist.group.WORLD)
    half = dataclasses.replace(parallel, tp_rank=1, tp_size=2)
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.q_proj.weight, model.lay"):
        WeightExport(_loaded(folder, half), shard_map_in(folder, half), group=dist.group.WORLD)
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
    export = WeightExport(live, shard_map_in(folder, ParallelRank()), group=None)
    assert export.buffer_bytes == 0
    weights = dict(export.full_weights(live.__getitem__))
    down = weights["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert down.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    save_file(weights, tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    wanted = load_file(folder / "model.safetensors")
    assert_same_weights(again, wanted)


def _change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    path = folder / "model.safetensors"
    changed = {**load_file(path), **{name.replace("__", "."): t for name, t in tensors.items()}}
    save_file({n: t for n, t in changed.items() if t is not None}, path, metadata={"format": "pt"})
    return folder


def load_nothing(folder: Path) -> None:
    load_weights({}, WeightFiles(folder), shard_map_in(folder, ParallelRank()))


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
    for words in (
        "2 missing: model.layers.0.self_attn.q_proj.weight, model.layers.1.mlp.up_p",
        "2 not of this model: model.layers.0.self_attn.q_proj.bias, model.layers.2",
        "1 of another shape: model.norm.weight is [31], and by config.json it must be [32]",
    ):
        assert words in str(raised.value)


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
    load_weights(local, Counting(folder), shard_map_in(folder, parallel))
    assert sum(num_read) == sum(tensor.numel() for tensor in local.values())  # 64 needs no padding
