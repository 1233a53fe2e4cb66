"""The architectures that megatron-core computes: options, frequencies, tensors of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.model import MEGATRON_MODEL_TYPES
from hybridrl.errors import ModelError
from hybridrl.models.architecture import Architecture, read_architecture
from hybridrl.models.families import ExpertNames, rope_of
from hybridrl.models.load import read_model_type
from hybridrl.models.model_folder import read_settings


def megatron_architecture(folder: Path) -> Architecture:
    """Read the architecture of a folder; a ModelError if megatron-core cannot compute all of it."""
    model_type = read_model_type(folder)
    if model_type not in MEGATRON_MODEL_TYPES:
        raise ModelError(
            f"{folder}: model_type={model_type!r} has no converter to megatron-core, only "
            f"{', '.join(MEGATRON_MODEL_TYPES)} have one. Set model.path to one of these, or "
            "actor=fsdp2; docs/megatron.md says why megatron-bridge does not help"
        )
    architecture, file = read_architecture(folder), folder / "config.json"
    if refused := [*_refused(read_settings(folder), architecture)]:
        raise ModelError(
            f"{file}: {'; '.join(refused)} is not supported with megatron-core. "
            "Supported are SiLU, attention over all tokens of a row without dropout, rotary "
            "embeddings of type default and llama3 over all of a head, and biases in both "
            "attention and MLP or in neither. Train this model with actor=fsdp2"
        )
    experts = architecture.experts
    if experts is not None and experts.num_per_token == 1 and experts.normalizes_weights:
        raise ModelError(
            f"{file}: num_experts_per_tok=1 with norm_topk_prob=true divides the "
            "weight of a token's only expert by itself. The weight is always 1, so the router has "
            "no gradient and never learns, and megatron-core rejects it. Set norm_topk_prob=false, "
            "or point model.path at a model with at least two experts per token"
        )
    return architecture


def _refused(values: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Name options that megatron-core would ignore without an error."""
    rope = rope_of(values)
    if window := _window(values, architecture):
        yield window
    wrong = {
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "rope_parameters": rope["rope_type"] not in ("default", "llama3")
        or (rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0) != 1.0,
        "attention_bias": architecture.has_output_bias != architecture.has_mlp_bias,
        "attention_dropout": bool(values.get("attention_dropout")),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            yield f"{key}={rope if key == 'rope_parameters' else values.get(key)!r}"


def _window(values: Mapping[str, Any], architecture: Architecture) -> str:
    """Name the option whose window hides earlier tokens of a row; empty where none does."""
    layer_types = values.get("layer_types") or []
    if architecture.window is not None:
        return f"sliding_window={architecture.window}"
    slides = "sliding_attention" in layer_types
    if not layer_types and values.get("use_sliding_window"):
        first = values.get("max_window_layers", 28)
        # Windows of a mixture of experts slide over all layers.
        is_late = isinstance(first, int) and first >= architecture.num_layers
        slides = values.get("sliding_window", 4096) is not None
        slides &= architecture.model_type == "qwen3_moe" or not is_late
    return f"use_sliding_window={values.get('use_sliding_window')!r}" if slides else ""


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Return the rotary angle per position, float32 [head_size / 2] radians, on the host.

    They are bitwise identical to those of transformers. Megatron-core's own support only Llama
    3.1's factors and original length.
    """
    exponents = torch.arange(0, architecture.head_size, 2, dtype=torch.int64).float()
    plain = 1.0 / (architecture.rope_theta ** (exponents / architecture.head_size))
    scaling = architecture.rope_scaling
    if scaling is None:
        return plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelengths = 2 * torch.pi / plain
    scaled_down = plain / scaling.factor
    share = (scaling.original_max_positions / wavelengths - low) / (high - low)
    between = (1 - share) * scaled_down + share * plain
    scaled = torch.where(wavelengths > scaling.original_max_positions / low, scaled_down, between)
    return torch.where(wavelengths < scaling.original_max_positions / high, plain, scaled)


Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
SCORE_BIAS = "score.bias"
LAST_NORM = "model.norm.weight"

_DENSE = ExpertNames()


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of a layer's tensors; layers count from 0."""
    return f"model.layers.{layer}."


@lru_cache(maxsize=8)
def hf_tensors(architecture: Architecture) -> Shapes:
    """Return the full shape of every tensor, tied ones once. Do not change the result.

    The order is that of ``named_parameters`` of the Hugging Face model. So every training engine
    sends the same stream in a weight sync.
    """
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
