"""The architecture in a Hugging Face folder's config.json, if megatron-core can compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.load import load_model_config, read_model_type

CONVERTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Architectures whose tensors have a counterpart in megatron-core's GPTModel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary embedding (arXiv:2407.21783, 3.4.2)."""

    factor: float
    """Long wavelengths grow by it."""

    low_frequency_factor: float
    """Wavelengths over ``original_max_positions / low_frequency_factor`` are long."""

    high_frequency_factor: float
    """Wavelengths under ``original_max_positions / high_frequency_factor`` stay as they are."""

    original_max_positions: int
    """Tokens that the model was pre-trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The mixture-of-experts layers of a model."""

    num_experts: int
    """Of one layer, over all ranks."""

    num_per_token: int
    """Experts that a token is sent to."""

    intermediate_size: int
    """Inside one expert."""

    normalizes_weights: bool
    """Whether the weights of a token's experts are divided by their sum."""

    sparse_layers: tuple[int, ...]
    """Layers, from 0, that have experts; the others have one dense MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder of the llama family: grouped queries, gated MLPs (SiLU), RMS norms, rotary."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_size: int

    intermediate_size: int
    """Of the dense MLPs."""

    vocab_size: int
    """Rows of the embedding in the files, without padding."""

    max_positions: int
    """Tokens of a sequence that the model was made for."""

    is_tied: bool
    """The output embedding is the input embedding."""

    has_qkv_bias: bool

    has_linear_bias: bool
    """Of the attention's last projection and of the MLPs: in megatron-core all or none have one."""

    has_head_norms: bool
    """Queries and keys are normalised head by head (Qwen3)."""

    norm_eps: float
    """Added to the mean square in RMS norms."""

    rope_theta: float
    """Base of the rotary wavelengths."""

    rope_scaling: RopeScaling | None

    experts: MoEConfig | None
    """None in a dense model."""

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.experts is not None and layer in self.experts.sparse_layers

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def key_size(self) -> int:
        """Width of all key heads; the values have it too."""
        return self.num_key_value_heads * self.head_size


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of a Hugging Face folder.

    Raises:
        ModelError: config.json is not usable, its architecture has no converter, or it sets an
            option that megatron-core would ignore.
    """
    model_type = read_model_type(folder)
    if model_type not in CONVERTED_MODEL_TYPES:
        raise ModelError(
            f"{folder}: model_type={model_type!r} has no converter to megatron-core, only "
            f"{', '.join(CONVERTED_MODEL_TYPES)} have one. Set model.path to one of these; others "
            "are planned with megatron-bridge, which is not supported yet"
        )
    config = load_model_config(folder)
    values: dict[str, Any] = config.to_dict()
    _reject_unsupported(folder, values)
    has_attention_bias = bool(values.get("attention_bias"))
    head_size = values.get("head_dim") or config.hidden_size // config.num_attention_heads
    return Architecture(
        model_type=model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_size=head_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        is_tied=config.tie_word_embeddings,
        has_qkv_bias=has_attention_bias or model_type == "qwen2",
        has_linear_bias=has_attention_bias and model_type != "qwen2",
        has_head_norms=model_type in ("qwen3", "qwen3_moe"),
        norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        rope_scaling=_scaling(config.rope_parameters),
        experts=_experts(folder, config) if model_type == "qwen3_moe" else None,
    )


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


def _reject_unsupported(folder: Path, values: Mapping[str, Any]) -> None:
    """Reject options that megatron-core would ignore without an error."""
    rope = values["rope_parameters"]
    has_attention_bias = bool(values.get("attention_bias")) and values["model_type"] != "qwen2"
    layer_types = values.get("layer_types") or []
    slides = "sliding_attention" in layer_types or (
        not layer_types and values.get("use_sliding_window") and values.get("sliding_window")
    )
    wrong = {
        "hidden_act": values["hidden_act"] != "silu",
        "use_sliding_window": slides,
        "rope_parameters": rope["rope_type"] not in ("default", "llama3")
        or rope.get("partial_rotary_factor", 1.0) != 1.0,
        "attention_bias": has_attention_bias != bool(values.get("mlp_bias")),
        "attention_dropout": bool(values.get("attention_dropout")),
    }
    named = [f"{key}={values.get(key)!r}" for key, is_wrong in wrong.items() if is_wrong]
    if named:
        raise ModelError(
            f"{folder / 'config.json'}: {'; '.join(named)} is not supported with megatron-core. "
            "Supported are SiLU, attention over all tokens of a row without dropout, rotary "
            "embeddings of type default and llama3 over all of a head, and biases in both "
            "attention and MLP or in neither. Train this model with actor=fsdp2"
        )


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    return RopeScaling(
        factor=rope["factor"],
        low_frequency_factor=rope["low_freq_factor"],
        high_frequency_factor=rope["high_freq_factor"],
        original_max_positions=rope["original_max_position_embeddings"],
    )


def _experts(folder: Path, config: Any) -> MoEConfig | None:  # noqa: ANN401 - a class per architecture
    sparse = tuple(
        layer
        for layer in range(config.num_hidden_layers)
        if layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
    )
    if not config.num_experts or not sparse:
        return None
    if config.num_experts_per_tok == 1 and config.norm_topk_prob:
        raise ModelError(
            f"{folder / 'config.json'}: num_experts_per_tok=1 with norm_topk_prob=true divides the "
            "weight of a token's only expert by itself. The weight is always 1, so the router has "
            "no gradient and never learns, and megatron-core rejects it. Set norm_topk_prob=false, "
            "or point model.path at a model with at least two experts per token"
        )
    return MoEConfig(
        num_experts=config.num_experts,
        num_per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalizes_weights=config.norm_topk_prob,
        sparse_layers=sparse,
    )
