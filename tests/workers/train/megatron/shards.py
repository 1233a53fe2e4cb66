"""Local tensors of megatron-core without megatron-core: names and shapes that its layers have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from hybridrl.models.architecture import Architecture, MoEConfig
from hybridrl.models.families import FAMILIES
from hybridrl.planning.split import padded_vocabulary
from hybridrl.workers.train.megatron.context import ParallelRank

Shapes = dict[str, tuple[int, ...]]


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[Architecture, list[ParallelRank]]:
    """Draw a model, and all ranks that share a layer of it."""
    tp, ep, etp = (draw(st.sampled_from([1, 2, 4]), label=name) for name in ("tp", "ep", "etp"))
    num_groups = draw(st.sampled_from([1, 2, 4, 8]), "groups")
    num_heads = num_groups * draw(st.integers(1, 3), "queries of a group") * tp
    num_layers = draw(st.integers(1, 3), "layers")
    architecture = Architecture(
        model_type="drawn",
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 4), "hidden") * tp,
        num_heads=num_heads,
        num_key_value_heads=num_groups,
        head_size=2 * draw(st.integers(1, 3), "head") * tp,
        intermediate_size=draw(st.integers(1, 4), "inner") * tp,
        vocab_size=draw(st.integers(1, 40), "vocabulary"),
        max_positions=16,
        is_tied=draw(st.booleans(), "tied"),
        has_qkv_bias=draw(st.booleans(), "qkv bias"),
        has_output_bias=draw(st.booleans(), "output bias"),
        has_mlp_bias=draw(st.booleans(), "MLP bias"),
        has_head_norms=draw(st.booleans(), "head norms"),
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        experts=MoEConfig(
            num_experts=ep * draw(st.integers(1, 2), "experts"),
            num_per_token=1,
            intermediate_size=draw(st.integers(1, 3), "inner of an expert") * etp,
            normalizes_weights=True,
            sparse_layers=tuple(range(draw(st.integers(0, num_layers), "sparse layers"))),
            shared_size=tp * draw(st.integers(0, 2), "inner of the shared expert"),
            names=FAMILIES[draw(st.sampled_from(["mixtral", "qwen3_moe"]), "names")].expert_names,
        ),
    )
    ranks = [
        ParallelRank(tp_rank=t, tp_size=tp, ep_rank=e, ep_size=ep, etp_rank=x, etp_size=etp)
        for t, e, x in product(range(tp), range(ep), range(etp))
    ]
    return architecture, ranks


def local_shapes(
    architecture: Architecture, rank: ParallelRank, *, is_fused: bool, lora_rank: int
) -> Shapes:
    """Return the tensors of one rank that has all layers.

    Args:
        architecture: of the model.
        rank: whose.
        is_fused: as TransformerEngine's layers have them: norms within linear layers, experts
            grouped.
        lora_rank: of adapters beside all linear layers; 0 for none.
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


def numel(shape: tuple[int, ...]) -> int:
    """Return the number of elements."""
    return math.prod(shape)
