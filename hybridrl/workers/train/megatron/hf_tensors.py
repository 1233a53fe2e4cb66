"""Names, shapes and order of the tensors in a model's files, computed alike on all ranks.

The order is that of ``named_parameters`` of the Hugging Face model. So every training engine sends
the same stream in a weight sync.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from hybridrl.models.adapter_names import ADAPTER_NAME
from hybridrl.models.architecture import Architecture
from hybridrl.models.families import ExpertNames

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
SCORE_BIAS = "score.bias"
LAST_NORM = "model.norm.weight"

_DENSE = ExpertNames()
"""Names of the matrices in an MLP that is no expert; those of most experts are the same."""


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of a layer's tensors; layers count from 0."""
    return f"model.layers.{layer}."


@lru_cache(maxsize=8)
def hf_tensors(architecture: Architecture) -> Shapes:
    """Return the full shape of every tensor, tied ones once, in order. Do not change the result."""
    vocabulary = (architecture.vocab_size, architecture.hidden_size)
    shapes: Shapes = {EMBEDDING: vocabulary}
    for layer in range(architecture.num_layers):
        shapes |= _layer(architecture, layer)
    shapes[LAST_NORM] = (architecture.hidden_size,)
    if architecture.classifier is not None:
        shapes[SCORE] = (1, architecture.hidden_size)
        if architecture.classifier == "token":
            shapes[SCORE_BIAS] = (1,)
    elif not architecture.is_tied:
        shapes[HEAD] = vocabulary
    return shapes


def adapter_tensors(architecture: Architecture, leaves: Collection[str], rank: int) -> Shapes:
    """Return the full shapes of the matrices A and B of an adapter, in order.

    Args:
        leaves: last components of the names of the adapted layers, such as ``q_proj``.
    """
    shapes: Shapes = {}
    for name, shape in hf_tensors(architecture).items():
        module = name.removesuffix(".weight")
        if module != name and module.rpartition(".")[2] in leaves:
            outputs, inputs = shape
            shapes[f"{module}.lora_A.{ADAPTER_NAME}.weight"] = (rank, inputs)
            shapes[f"{module}.lora_B.{ADAPTER_NAME}.weight"] = (outputs, rank)
    return shapes


def _layer(architecture: Architecture, layer: int) -> Shapes:
    hidden, experts = architecture.hidden_size, architecture.experts
    shapes = _attention(architecture)
    if experts is None or not architecture.is_sparse(layer):
        shapes |= _mlp("mlp", architecture, architecture.intermediate_size)
    else:
        block, inner = experts.names.block, experts.intermediate_size
        for expert in range(experts.num_experts):
            shapes |= _mlp(f"{block}.experts.{expert}", architecture, inner, experts.names)
        shapes[f"{block}.gate.weight"] = (experts.num_experts, hidden)
        if experts.shared_size:
            shapes |= _mlp("mlp.shared_expert", architecture, experts.shared_size)
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    return {layer_prefix(layer) + name: shape for name, shape in shapes.items()}


def _attention(architecture: Architecture) -> Shapes:
    hidden, query, key = architecture.hidden_size, architecture.query_size, architecture.key_size
    shapes: Shapes = {}
    for leaf, outputs in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        shapes |= _linear(f"self_attn.{leaf}", outputs, hidden, has_bias=architecture.has_qkv_bias)
    shapes |= _linear("self_attn.o_proj", hidden, query, has_bias=architecture.has_output_bias)
    if architecture.has_head_norms:
        for leaf in ("q_norm", "k_norm"):
            shapes[f"self_attn.{leaf}.weight"] = (architecture.head_size,)
    return shapes


def _mlp(
    module: str, architecture: Architecture, inner: int, names: ExpertNames = _DENSE
) -> Shapes:
    hidden, has_bias = architecture.hidden_size, architecture.has_mlp_bias
    return (
        _linear(f"{module}.{names.gate}", inner, hidden, has_bias=has_bias)
        | _linear(f"{module}.{names.up}", inner, hidden, has_bias=has_bias)
        | _linear(f"{module}.{names.down}", hidden, inner, has_bias=has_bias)
    )


def _linear(module: str, outputs: int, inputs: int, *, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{module}.weight": (outputs, inputs)}
    return shapes | {f"{module}.bias": (outputs,)} if has_bias else shapes
