"""Configuration objects of megatron-core, from our keys and from its own fields set by a user."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch
from torch.nn.functional import silu

from hybridrl.config.actor import ActorConfig
from hybridrl.config.checks.megatron import INSTALL_TRANSFORMER_ENGINE, keys_of_transformer_engine
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import LoraConfig
from hybridrl.errors import ConfigError, close_names
from hybridrl.models.architecture import MLP_MODULES, Architecture
from hybridrl.workers.train.megatron.context import Duty, MegatronContext
from hybridrl.workers.train.megatron.megatron_core import (
    HAVE_FUSED_PERMUTE,
    HAVE_FUSED_ROPE,
    HAVE_TE,
    IMPORT_WARNINGS,
    AttnBackend,
    DistributedDataParallelConfig,
    OptimizerConfig,
    TransformerConfig,
)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # values of fields that are types of numbers

Configuration = TypeVar("Configuration")


def build_configuration(
    kind: type[Configuration],
    own_values: Mapping[str, object],
    user_values: Mapping[str, ArgumentValue],
    *,
    key: str,
) -> Configuration:
    """Build a configuration from our keys and the user's fields; a ConfigError if it is refused."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in user_values.items():
        if name not in types:
            entry = f"{key}.{name}"
            rule = f"megatron-core's {kind.__name__} has no such field"
            close = " or ".join(map(repr, close_names(name, list(types))))
            fix = f"{f'did you mean {close}? Else ' if close else ''}leave it out, or add ~{entry}"
            raise ConfigError(entry, value, rule, fix, remedies=[(f"~{entry}",)])
    values = {name: _as_field(f"{key}.{name}", types[name], v) for name, v in user_values.items()}
    try:
        return kind(**{**own_values, **values})
    except (TypeError, ValueError, AssertionError, RuntimeError, ImportError) as err:
        raise ConfigError(
            key if user_values else "megatron",
            dict(user_values) or "as configured",
            f"megatron-core's {kind.__name__} rejects it: {' '.join(str(err).split())}",
            f"change the value it names; fields: {kind.__module__}.{kind.__name__}",
        ) from err


def _as_field(key: str, kind: object, value: ArgumentValue) -> object:
    """Convert text and lists to the type of their field."""
    if "dtype" in str(kind) and isinstance(value, str):
        if value not in _DTYPES:
            fix = f"set {key} to one of them"
            raise ConfigError(key, value, f"must be one of {', '.join(_DTYPES)}", fix)
        return _DTYPES[value]
    return list(value) if isinstance(value, tuple) else value


def optimizer_config(engine: ActorConfig, megatron: MegatronConfig) -> OptimizerConfig:
    """Describe optimizer steps to megatron-core; see ``build_configuration`` for its errors."""
    is_half = engine.compute_dtype == "bfloat16"
    adamw = engine.optimizer
    own_values: dict[str, object] = {
        "optimizer": "adam",
        "lr": adamw.lr,
        "weight_decay": adamw.weight_decay,
        "adam_beta1": adamw.beta1,
        "adam_beta2": adamw.beta2,
        "adam_eps": adamw.eps,
        "clip_grad": 0.0,  # optimizer.py clips, after its guard
        "bf16": is_half,
        "params_dtype": torch.bfloat16 if is_half else torch.float32,
        "use_distributed_optimizer": True,
        "optimizer_offload_fraction": 1.0,  # where optimizer_cpu_offload asks for any; its own is 0
        "store_param_remainders": False,  # OptimizerState needs full masters
    }
    return build_configuration(
        OptimizerConfig, own_values, megatron.optimizer_args, key="megatron.optimizer_args"
    )


def ddp_config(
    megatron: MegatronConfig, device: torch.device, *, duty: Duty
) -> DistributedDataParallelConfig:
    """Describe the sum of gradients to megatron-core; see ``build_configuration`` for its errors.

    Adapters are gathered at once: no module of theirs is called that could wait for them.
    """
    given = dict(megatron.ddp_args)
    is_overlapped = given.setdefault("overlap_grad_reduce", device.type == "cuda")
    gathers_later = given.pop("overlap_param_gather", is_overlapped)
    own_values: dict[str, object] = {
        "grad_reduce_in_fp32": True,
        "overlap_param_gather": gathers_later and duty == "learns",
        "use_distributed_optimizer": True,
    }
    return build_configuration(
        DistributedDataParallelConfig, own_values, given, key="megatron.ddp_args"
    )


log = logging.getLogger(__name__)

_RECOMPUTED_BY_TE = ("layernorm", "moe_act")
"""Without TransformerEngine megatron-core 0.16.1 asks a name that was never bound."""

_CUDA_GRAPHS = (
    "cuda_graph_modules"
    if "cuda_graph_modules" in TransformerConfig.__dataclass_fields__
    else "cuda_graph_scope"
)

_FP8_MULTIPLE = 32  # of the strictest of TransformerEngine's 8-bit recipes


def require_transformer_engine(megatron: MegatronConfig) -> None:
    """Refuse what only TransformerEngine can serve, where it cannot be imported."""
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


def adapting_duty(architecture: Architecture, lora: LoraConfig) -> Duty:
    """Return the duty of a frozen model with adapters; adapted experts compute one by one."""
    is_of_experts = architecture.experts is not None and {*lora.modules} & {*MLP_MODULES}
    return "adapts_experts" if is_of_experts else "adapts"


def token_multiple(config: TransformerConfig) -> int:
    """Return the number that divides the tokens of a micro-batch on each rank."""
    num_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return num_ranks * (_FP8_MULTIPLE if config.fp8 or config.fp4 else 1)


def transformer_config(
    architecture: Architecture, context: MegatronContext, engine: ActorConfig, *, duty: Duty
) -> TransformerConfig:
    """Describe the model to megatron-core."""
    megatron, device, dtype = context.megatron, context.device, _DTYPES[engine.compute_dtype]
    require_transformer_engine(megatron)
    is_fused = fuses_layers(megatron, device)
    arguments = {
        **_sizes(architecture),
        **_experts(architecture),
        **_parallelism(megatron),
        **_fusions(architecture, duty, is_cuda=device.type == "cuda", is_fused=is_fused),
        **_recomputed(megatron, engine, is_fused=is_fused),
        "attention_backend": _attention(context, engine, is_fused=is_fused),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
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


def _attention(context: MegatronContext, engine: ActorConfig, *, is_fused: bool) -> AttnBackend:
    """Return ``auto``, which is TransformerEngine's, or ``local``: ``layers.PackedAttention``."""
    is_theirs = context.megatron.attention == "transformer_engine"
    if context.megatron.attention == "auto":
        is_16_bit, is_asked = engine.compute_dtype == "bfloat16", context.model.attention == "auto"
        is_theirs = is_fused and is_16_bit and is_asked and context.device.type == "cuda"
    return AttnBackend.auto if is_theirs else AttnBackend.local


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
    architecture: Architecture, duty: Duty, *, is_cuda: bool, is_fused: bool
) -> dict[str, object]:
    """Let one kernel do the work of several, wherever there is one."""
    has_experts = architecture.experts is not None
    return {
        "transformer_impl": "transformer_engine" if is_fused else "local",
        # TransformerEngine's 8-bit copies of weights would stay on the device of a sleeping model.
        "disable_parameter_transpose_cache": is_fused,
        "moe_grouped_gemm": is_fused and has_experts and duty != "adapts_experts",
        # Both by torch.compile, which on a CPU takes minutes of g++.
        "bias_activation_fusion": is_cuda,
        "bias_dropout_fusion": is_cuda,
        "apply_rope_fusion": is_fused and HAVE_FUSED_ROPE,
        "moe_permute_fusion": is_fused and has_experts and HAVE_FUSED_PERMUTE,
        "gradient_accumulation_fusion": is_fused and duty == "learns",
        "masked_softmax_fusion": False,  # of an attention that is never built
    }


def _recomputed(
    megatron: MegatronConfig, engine: ActorConfig, *, is_fused: bool
) -> dict[str, object]:
    if not engine.gradient_checkpointing:
        return {}
    modules = megatron.transformer_args.get("recompute_modules")
    if isinstance(modules, tuple) and modules:
        unable = [module for module in _RECOMPUTED_BY_TE if module in modules and not is_fused]
        if unable:
            raise ConfigError(
                "megatron.transformer_args.recompute_modules",
                list(modules),
                f"megatron-core recomputes {' and '.join(unable)} only in TransformerEngine's "
                "layers, and these are its own",
                f"{INSTALL_TRANSFORMER_ENGINE}, or leave out {' and '.join(unable)}",
            )
        return {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
