"""The architectures that megatron-core computes: options, frequencies, tensors of their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.model import MEGATRON_MODEL_TYPES
from hybridrl.errors import ModelError
from hybridrl.models.architecture import Architecture, read_architecture
from hybridrl.models.experts import StoredNames
from hybridrl.models.families import rope_of
from hybridrl.models.load import build_empty_model, build_with_head, read_model_type
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

HEAD = "lm_head.weight"


def hf_tensors(folder: Path) -> Shapes:
    """Return the full shape of every tensor that a folder's files must have, tied ones once.

    The order is that of ``named_parameters`` of the Hugging Face model. So every training engine
    sends the same stream in a weight sync.
    """
    classifier = read_architecture(folder).classifier
    if classifier is None:
        model = build_empty_model(folder, dtype=torch.bfloat16)
    else:
        model = build_with_head(folder, is_of_tokens=classifier == "token", dtype=torch.bfloat16)
    names = StoredNames(model.config.model_type)
    return {
        stored: tuple(shape)
        for name, parameter in model.named_parameters()
        for stored, shape in names.shapes(name, parameter.shape)
    }
