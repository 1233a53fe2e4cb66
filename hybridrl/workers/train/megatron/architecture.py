"""What a Hugging Face folder's config.json says that megatron-core must compute, or a refusal."""

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
"""Architectures whose tensors have a place in megatron-core's GPTModel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How Llama 3.1 stretches its rotary embedding (arXiv:2407.21783, 3.4.2)."""

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
    """Of the attention's last projection and of the MLPs: megatron-core knows all or none."""

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
        ModelError: no usable config.json, an architecture without converter, or one whose
            config.json asks for something that would be computed wrongly.
    """
    model_type = read_model_type(folder)
    if model_type not in CONVERTED_MODEL_TYPES:
        raise ModelError(
            f"{folder}: model_type={model_type!r} has no converter to megatron-core; those with "
            f"one are {', '.join(CONVERTED_MODEL_TYPES)}. Set model.path to one of these; others "
            "will come with megatron-bridge, an optional extra that is planned and not built"
        )
    config = load_model_config(folder)
    values: dict[str, Any] = config.to_dict()
    _refuse_the_unknown(folder, values)
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


def _refuse_the_unknown(folder: Path, values: Mapping[str, Any]) -> None:
    """Refuse what would be computed without an error, and wrongly."""
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
            f"{folder / 'config.json'}: {'; '.join(named)} cannot be computed with megatron-core "
            "here: it knows SiLU, attention over the whole row without dropout, rotary embeddings "
            "of type default and llama3 over whole heads, and biases in attention and MLP "
            "together. Train this model with actor=fsdp2"
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
            "weight of a token's only expert by itself: it is always 1, the router has no gradient "
            "and never learns, so megatron-core refuses it. A model that was trained so says "
            "norm_topk_prob=false; set that, or point model.path at a model with two experts a "
            "token or more"
        )
    return MoEConfig(
        num_experts=config.num_experts,
        num_per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalizes_weights=config.norm_topk_prob,
        sparse_layers=sparse,
    )
