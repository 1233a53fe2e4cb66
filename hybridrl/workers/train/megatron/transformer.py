"""From a model's architecture and a run's configuration to megatron-core's TransformerConfig."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch.nn.functional import silu

from hybridrl.config.actor import EngineConfig
from hybridrl.config.architecture import MLP_MODULES, Architecture
from hybridrl.config.checks.megatron import INSTALL_TRANSFORMER_ENGINE
from hybridrl.config.lora import LoraConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import ModelConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.train.megatron.given import build_configuration
from hybridrl.workers.train.megatron.megatron_core import (
    HAVE_FUSED_PERMUTE,
    HAVE_FUSED_ROPE,
    HAVE_TE,
    IMPORT_WARNINGS,
    AttnBackend,
    TransformerConfig,
)

log = logging.getLogger(__name__)

Duty = Literal["learns", "adapts", "adapts_experts", "scores"]
"""What a model is for: its weights learn, adapters beside some or beside experts do, or nothing."""

_RECOMPUTED_BY_TE = ("layernorm", "moe_act")
"""Without TransformerEngine megatron-core 0.16.1 asks a name that was never bound."""

_FP8_MULTIPLE = 32
"""Tokens that the strictest of TransformerEngine's 8-bit recipes wants in each matrix product."""


def fuses_layers(megatron: MegatronConfig, device: torch.device) -> bool:
    """Say whether layers are TransformerEngine's.

    Raises:
        ConfigError: they are asked for, and it is not installed.
    """
    if megatron.layers == "auto":
        return HAVE_TE and device.type == "cuda"
    if megatron.layers == "transformer_engine" and not HAVE_TE:
        raise ConfigError(
            "megatron.layers",
            megatron.layers,
            "TransformerEngine cannot be imported",
            f"{INSTALL_TRANSFORMER_ENGINE}, or set megatron.layers=local",
        )
    return megatron.layers == "transformer_engine"


def lacking_kernels(megatron: MegatronConfig, device: torch.device) -> str:
    """Say what is slower because TransformerEngine is not here; nothing where nothing is."""
    if HAVE_TE or device.type != "cuda" or megatron.layers == "local":
        return ""
    return (
        "TransformerEngine is not installed here: layers are megatron-core's own, with experts "
        "computed one after another, and norms, rotary embeddings and attention by separate "
        f"kernels; {INSTALL_TRANSFORMER_ENGINE}, or set megatron.layers=local if this is meant"
    )


@cache
def _tell(level: int, text: str) -> None:
    log.log(level, "%s", text)


def tell_once(megatron: MegatronConfig, device: torch.device) -> None:
    """Log what TransformerEngine's absence costs, and what megatron-core warned of: on one rank."""
    # On a CPU there is nothing to install, and nothing to tell.
    level = logging.WARNING if device.type == "cuda" else logging.DEBUG
    if missing := lacking_kernels(megatron, device):
        _tell(level, missing)
    for text in IMPORT_WARNINGS:
        _tell(level, f"megatron-core: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which parts of a model TransformerEngine computes; with none layers are megatron-core's."""

    has_layers: bool
    """Linear layers and norms."""

    has_attention: bool = False
    """The core of attention, over packs laid out row by row."""

    groups_experts: bool = False
    """All experts of a rank in one product."""

    sums_gradients: bool = False
    """Products that give weights their gradients add them where they are summed."""


def choose_kernels(
    architecture: Architecture,
    *,
    megatron: MegatronConfig,
    model: ModelConfig,
    engine: EngineConfig,
    device: torch.device,
    duty: Duty,
) -> Kernels:
    """Choose who computes what.

    Raises:
        ConfigError: TransformerEngine is asked for, and cannot be imported; or its attention is,
            and layers are not its own.
    """
    has_layers = fuses_layers(megatron, device)
    is_16_bit = engine.compute_dtype == "bfloat16"
    has_attention = megatron.attention == "transformer_engine"
    if has_attention and not has_layers:
        raise ConfigError(
            "megatron.attention",
            megatron.attention,
            "TransformerEngine's attention comes with its layers, and these are megatron-core's",
            f"{INSTALL_TRANSFORMER_ENGINE}, or set megatron.attention=auto",
        )
    if megatron.attention == "auto":
        is_asked = model.attention == "auto"
        has_attention = has_layers and is_16_bit and is_asked and device.type == "cuda"
    return Kernels(
        has_layers=has_layers,
        has_attention=has_attention,
        groups_experts=has_layers and architecture.experts is not None and duty != "adapts_experts",
        sums_gradients=has_layers and duty == "learns",
    )


def adapting_duty(architecture: Architecture, lora: LoraConfig) -> Duty:
    """Return what a frozen model with adapters is for: experts with adapters compute one by one."""
    is_of_experts = architecture.experts is not None and {*lora.modules} & {*MLP_MODULES}
    return "adapts_experts" if is_of_experts else "adapts"


def token_multiple(config: TransformerConfig) -> int:
    """Return of what the tokens that a rank has of a pack must be a multiple."""
    num_shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return num_shares * (_FP8_MULTIPLE if config.fp8 or config.fp4 else 1)


def transformer_config(
    architecture: Architecture,
    *,
    megatron: MegatronConfig,
    engine: EngineConfig,
    device: torch.device,
    kernels: Kernels,
) -> TransformerConfig:
    """Say to megatron-core what to compute.

    Args:
        architecture: of the model.
        megatron: parallel sizes, and further fields.
        engine: types and activation checkpointing.
        device: where the model computes.
        kernels: who computes what.

    Raises:
        ConfigError: it does not take ``megatron.transformer_args``, or refuses the whole.
    """
    is_fused = kernels.has_layers
    if is_fused:
        _require_shared_experts(architecture, megatron)
    is_half = engine.compute_dtype == "bfloat16"
    dtype = torch.bfloat16 if is_half else torch.float32
    arguments: dict[str, object] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_size,
        "ffn_hidden_size": architecture.intermediate_size,
        "layernorm_epsilon": architecture.norm_eps,
        "qk_layernorm": architecture.has_head_norms,
        "add_qkv_bias": architecture.has_qkv_bias,
        "add_bias_linear": architecture.has_mlp_bias,
        "normalization": "RMSNorm",
        "transformer_impl": "transformer_engine" if is_fused else "local",
        "moe_grouped_gemm": kernels.groups_experts,
        "attention_backend": AttnBackend.auto if kernels.has_attention else AttnBackend.local,
        "gated_linear_unit": True,
        "activation_func": silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": is_half,
        "tensor_model_parallel_size": megatron.tensor_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_parallel_size,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_stage,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "variable_seq_lengths": megatron.pipeline_parallel_size > 1,
        "moe_token_dispatcher_type": "alltoall",  # the one that takes packs of any length
        # Token weights are shares of the global loss: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,  # weights come from files
        "cuda_graph_scope": [],  # the default warns that it is deprecated
        # TransformerEngine's 8-bit copies of weights would stay on the device of a sleeping model.
        "disable_parameter_transpose_cache": is_fused,
    }
    if megatron.num_virtual_stages > 1:
        arguments |= {
            "virtual_pipeline_model_parallel_size": megatron.num_virtual_stages,
            "microbatch_group_size_per_vp_stage": megatron.pipeline_parallel_size,
            # Of two ranks each is the other's last and next: batched messages would be mixed up.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    arguments |= _fusions(architecture, device=device, kernels=kernels)
    arguments |= _recomputed(megatron, engine, is_fused=is_fused) | _experts(architecture)
    return build_configuration(
        TransformerConfig, arguments, megatron.transformer_args, key="megatron.transformer_args"
    )


def _require_shared_experts(architecture: Architecture, megatron: MegatronConfig) -> None:
    """Refuse grouped experts that each tensor-parallel rank has whole: nobody adds what they learn.

    ``layers.mark_shards`` has it done for megatron-core's own layers alone.
    """
    is_whole = megatron.expert_parallel_size == megatron.expert_tensor_parallel_size == 1
    if architecture.experts is not None and megatron.tensor_parallel_size > 1 and is_whole:
        raise ConfigError(
            "megatron.expert_parallel_size",
            1,
            f"TransformerEngine's experts would be whole on each of "
            f"{megatron.tensor_parallel_size} tensor-parallel ranks, and learn apart",
            f"set megatron.expert_parallel_size={megatron.tensor_parallel_size}, or "
            "megatron.layers=local",
        )


def _fusions(
    architecture: Architecture, *, device: torch.device, kernels: Kernels
) -> dict[str, object]:
    """Let one kernel do what several would, wherever there is one."""
    is_compiled = device.type == "cuda"  # by torch.compile, which on a CPU takes minutes of g++
    has_experts = architecture.experts is not None
    return {
        "bias_activation_fusion": is_compiled,
        "bias_dropout_fusion": is_compiled,
        "apply_rope_fusion": kernels.has_layers and HAVE_FUSED_ROPE,
        "moe_permute_fusion": kernels.has_layers and has_experts and HAVE_FUSED_PERMUTE,
        "gradient_accumulation_fusion": kernels.sums_gradients,
        "masked_softmax_fusion": False,  # of an attention that is never built
    }


def _recomputed(
    megatron: MegatronConfig, engine: EngineConfig, *, is_fused: bool
) -> dict[str, object]:
    if not engine.gradient_checkpointing:
        return {}
    modules = [*megatron.recompute_modules]
    if modules:
        unable = [module for module in _RECOMPUTED_BY_TE if module in modules and not is_fused]
        if unable:
            raise ConfigError(
                "megatron.recompute_modules",
                modules,
                f"megatron-core recomputes {' and '.join(unable)} with TransformerEngine's help, "
                "and layers are its own",
                f"{INSTALL_TRANSFORMER_ENGINE}, or leave out {' and '.join(unable)}",
            )
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _experts(architecture: Architecture) -> dict[str, object]:
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [
            int(architecture.is_sparse(layer)) for layer in range(architecture.num_layers)
        ],
        "moe_router_pre_softmax": not experts.normalizes_weights,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # balance.py has it
    }
