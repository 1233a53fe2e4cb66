"""From a model's architecture and a run's configuration to megatron-core's TransformerConfig."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn.functional import silu

from hybridrl.config.actor import EngineConfig
from hybridrl.config.checks.megatron import INSTALL_TRANSFORMER_ENGINE
from hybridrl.config.checks.megatron_args import keys_of_transformer_engine
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import LoraConfig
from hybridrl.errors import ConfigError
from hybridrl.models.architecture import MLP_MODULES, Architecture
from hybridrl.workers.train.megatron.configuration import build_configuration
from hybridrl.workers.train.megatron.context import Duty, MegatronContext
from hybridrl.workers.train.megatron.megatron_core import (
    HAVE_FUSED_PERMUTE,
    HAVE_FUSED_ROPE,
    HAVE_TE,
    IMPORT_WARNINGS,
    AttnBackend,
    TransformerConfig,
)

log = logging.getLogger(__name__)

_RECOMPUTED_BY_TE = ("layernorm", "moe_act")
"""Without TransformerEngine megatron-core 0.16.1 asks a name that was never bound."""

_CUDA_GRAPHS = (
    "cuda_graph_modules"
    if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__
    else "cuda_graph_scope"
)

_FP8_MULTIPLE = 32
"""Tokens that the strictest of TransformerEngine's 8-bit recipes wants in each matrix product."""


def require_transformer_engine(megatron: MegatronConfig) -> None:
    """Refuse what only TransformerEngine can serve, where it cannot be imported.

    Raises:
        ConfigError: names the key.
    """
    for key, value in {} if HAVE_TE else keys_of_transformer_engine(megatron).items():
        others = {"megatron.layers": "local", "megatron.attention": "packed"}
        change = f"set {key}={others[key]}" if key in others else f"add ~{key}"
        fix = f"{INSTALL_TRANSFORMER_ENGINE}, or {change}"
        raise ConfigError(key, value, "it needs TransformerEngine, which cannot be imported", fix)


def fuses_layers(megatron: MegatronConfig, device: torch.device) -> bool:
    """Whether layers are TransformerEngine's."""
    if megatron.layers == "auto":
        return HAVE_TE and device.type == "cuda"
    return megatron.layers == "transformer_engine"


def lacking_kernels(megatron: MegatronConfig, device: torch.device) -> str:
    """Name the work that is slower without TransformerEngine; empty where it would not help."""
    if HAVE_TE or device.type != "cuda" or megatron.layers == "local":
        return ""
    return (
        "TransformerEngine cannot be imported here: layers are megatron-core's own, with experts "
        "computed one after another, and norms, rotary embeddings and attention by separate "
        f"kernels; {INSTALL_TRANSFORMER_ENGINE}, or set megatron.layers=local if this is meant"
    )


@cache
def _log_once(level: int, text: str) -> None:
    log.log(level, "%s", text)


def log_warnings_once(megatron: MegatronConfig, device: torch.device) -> None:
    """Log the cost of a missing TransformerEngine, and megatron-core's warnings: on one rank."""
    # On a CPU there is nothing to install.
    level = logging.WARNING if device.type == "cuda" else logging.DEBUG
    if missing := lacking_kernels(megatron, device):
        _log_once(level, missing)
    for text in IMPORT_WARNINGS:
        _log_once(level, f"megatron-core: {text}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The layers of a model that TransformerEngine computes; the others are megatron-core's."""

    has_layers: bool
    """Linear layers and norms."""

    has_attention: bool = False
    """The core of attention, over micro-batches laid out row by row."""

    groups_experts: bool = False
    """All experts of a rank in one product."""

    sums_gradients: bool = False
    """Products for weight gradients add them to the buffer in which they are summed."""


def choose_kernels(
    architecture: Architecture, context: MegatronContext, engine: EngineConfig, *, duty: Duty
) -> Kernels:
    """Choose the library that computes each kind of layer.

    Raises:
        ConfigError: see ``require_transformer_engine``.
    """
    megatron, is_cuda = context.megatron, context.device.type == "cuda"
    require_transformer_engine(megatron)
    has_layers = fuses_layers(megatron, context.device)
    has_attention = megatron.attention == "transformer_engine"
    if megatron.attention == "auto":
        is_16_bit, is_asked = engine.compute_dtype == "bfloat16", context.model.attention == "auto"
        has_attention = has_layers and is_16_bit and is_asked and is_cuda
    return Kernels(
        has_layers=has_layers,
        has_attention=has_attention,
        groups_experts=has_layers and architecture.experts is not None and duty != "adapts_experts",
        sums_gradients=has_layers and duty == "learns",
    )


def adapting_duty(architecture: Architecture, lora: LoraConfig) -> Duty:
    """Return the duty of a frozen model with adapters; adapted experts compute one by one."""
    is_of_experts = architecture.experts is not None and {*lora.modules} & {*MLP_MODULES}
    return "adapts_experts" if is_of_experts else "adapts"


def token_multiple(config: TransformerConfig) -> int:
    """Return the number that divides the tokens of a micro-batch on each rank."""
    num_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return num_ranks * (_FP8_MULTIPLE if config.fp8 or config.fp4 else 1)


def transformer_config(
    architecture: Architecture, context: MegatronContext, engine: EngineConfig, *, kernels: Kernels
) -> TransformerConfig:
    """Describe the model to megatron-core.

    Raises:
        ConfigError: it does not take ``megatron.transformer_args``, or rejects the configuration.
    """
    megatron, device = context.megatron, context.device
    arguments = {
        **_sizes(architecture),
        **_experts(architecture),
        **_precision(engine),
        **_parallelism(megatron),
        **_fusions(architecture, device=device, kernels=kernels),
        **_recomputed(megatron, engine, is_fused=kernels.has_layers),
        "attention_backend": AttnBackend.auto if kernels.has_attention else AttnBackend.local,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Token weights are shares of the global loss: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,  # weights come from files
        _CUDA_GRAPHS: [],  # the default warns that it is deprecated
    }
    return build_configuration(
        TransformerConfig, arguments, megatron.transformer_args, key="megatron.transformer_args"
    )


def _sizes(architecture: Architecture) -> dict[str, object]:
    return {
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
        "gated_linear_unit": True,
        "activation_func": silu,
    }


def _experts(architecture: Architecture) -> dict[str, object]:
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.shared_size > 0,
        "moe_layer_freq": [
            int(architecture.is_sparse(layer)) for layer in range(architecture.num_layers)
        ],
        "moe_router_pre_softmax": not experts.normalizes_weights,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # LoadBalance has it
    }


def _precision(engine: EngineConfig) -> dict[str, object]:
    is_half = engine.compute_dtype == "bfloat16"
    dtype = torch.bfloat16 if is_half else torch.float32
    return {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": is_half}


def _parallelism(megatron: MegatronConfig) -> dict[str, object]:
    sizes: dict[str, object] = {
        "tensor_model_parallel_size": megatron.tensor_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "pipeline_model_parallel_size": megatron.pipeline_parallel_size,
        "num_layers_in_first_pipeline_stage": megatron.num_layers_in_first_stage,
        "num_layers_in_last_pipeline_stage": megatron.num_layers_in_last_stage,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "variable_seq_lengths": megatron.pipeline_parallel_size > 1,
        "moe_token_dispatcher_type": "alltoall",  # the one for micro-batches of any length
    }
    if megatron.num_virtual_stages > 1:
        sizes |= {
            "virtual_pipeline_model_parallel_size": megatron.num_virtual_stages,
            "microbatch_group_size_per_vp_stage": megatron.pipeline_parallel_size,
            # Of two ranks each is the other's last and next: batched messages would be mixed up.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return sizes


def _fusions(
    architecture: Architecture, *, device: torch.device, kernels: Kernels
) -> dict[str, object]:
    """Let one kernel do the work of several, wherever there is one."""
    is_compiled = device.type == "cuda"  # by torch.compile, which on a CPU takes minutes of g++
    has_experts = architecture.experts is not None
    return {
        "transformer_impl": "transformer_engine" if kernels.has_layers else "local",
        # TransformerEngine's 8-bit copies of weights would stay on the device of a sleeping model.
        "disable_parameter_transpose_cache": kernels.has_layers,
        "moe_grouped_gemm": kernels.groups_experts,
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
                f"megatron-core recomputes {' and '.join(unable)} only in TransformerEngine's "
                "layers, and these are its own",
                f"{INSTALL_TRANSFORMER_ENGINE}, or leave out {' and '.join(unable)}",
            )
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
