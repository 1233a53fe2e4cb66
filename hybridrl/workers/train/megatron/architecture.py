"""Which architectures megatron-core computes here, and their rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.architecture import Architecture, read_architecture, rope_of
from hybridrl.config.model import MEGATRON_MODEL_TYPES
from hybridrl.config.model_folder import read_settings
from hybridrl.errors import ModelError
from hybridrl.models.load import read_model_type


def megatron_architecture(folder: Path) -> Architecture:
    """Read the architecture of a Hugging Face folder that megatron-core is to compute.

    Raises:
        ModelError: no usable config.json, an architecture without converter, or one whose
            config.json asks for something that would be computed wrongly.
    """
    model_type = read_model_type(folder)
    if model_type not in MEGATRON_MODEL_TYPES:
        raise ModelError(
            f"{folder}: model_type={model_type!r} has no converter to megatron-core; those with "
            f"one are {', '.join(MEGATRON_MODEL_TYPES)}. Set model.path to one of these; others "
            "will come with megatron-bridge, an optional extra that is planned and not built"
        )
    architecture, file = read_architecture(folder), folder / "config.json"
    if refused := [*_refused(read_settings(folder), architecture)]:
        raise ModelError(
            f"{file}: {'; '.join(refused)} cannot be computed with megatron-core "
            "here: it knows SiLU, attention over the whole row without dropout, rotary embeddings "
            "of type default and llama3 over whole heads, and biases in attention and MLP "
            "together. Train this model with actor=fsdp2"
        )
    experts = architecture.experts
    if experts is not None and experts.num_per_token == 1 and experts.normalizes_weights:
        raise ModelError(
            f"{file}: num_experts_per_tok=1 with norm_topk_prob=true divides the "
            "weight of a token's only expert by itself: it is always 1, the router has no gradient "
            "and never learns, so megatron-core refuses it. A model that was trained so says "
            "norm_topk_prob=false; set that, or point model.path at a model with two experts a "
            "token or more"
        )
    return architecture


def _refused(values: Mapping[str, Any], architecture: Architecture) -> Iterator[str]:
    """Name what would be computed without an error, and wrongly."""
    rope, layer_types = rope_of(values), values.get("layer_types") or []
    slides = "sliding_attention" in layer_types
    if not layer_types and values.get("use_sliding_window"):
        first = values.get("max_window_layers", 28)
        # Windows of a mixture of experts slide over all layers.
        is_late = isinstance(first, int) and first >= architecture.num_layers
        slides = values.get("sliding_window", 4096) is not None
        slides &= architecture.model_type == "qwen3_moe" or not is_late
    wrong = {
        "hidden_act": values.get("hidden_act", "silu") != "silu",
        "use_sliding_window": slides,
        "rope_parameters": rope["rope_type"] not in ("default", "llama3")
        or (rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0) != 1.0,
        "attention_bias": architecture.has_output_bias != architecture.has_mlp_bias,
        "attention_dropout": bool(values.get("attention_dropout")),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            yield f"{key}={rope if key == 'rope_parameters' else values.get(key)!r}"


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """Return the rotary angle per position, float32 [head_size / 2] radians, on the host.

    They are bit by bit those of transformers; megatron-core's own know neither another original
    length nor other factors than Llama 3.1's.
    """
    exponents = torch.arange(0, architecture.head_size, 2, dtype=torch.int64).float()
    plain = 1.0 / (architecture.rope_theta ** (exponents / architecture.head_size))
    scaling = architecture.rope_scaling
    if scaling is None:
        return plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelengths = 2 * torch.pi / plain
    stretched = plain / scaling.factor
    share = (scaling.original_max_positions / wavelengths - low) / (high - low)
    between = (1 - share) * stretched + share * plain
    scaled = torch.where(wavelengths > scaling.original_max_positions / low, stretched, between)
    return torch.where(wavelengths < scaling.original_max_positions / high, plain, scaled)
