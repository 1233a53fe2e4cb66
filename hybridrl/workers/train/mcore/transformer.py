"""From a model's architecture and a run's configuration to megatron-core's TransformerConfig."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from hybridrl.config.actor import EngineConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.errors import ConfigError
from hybridrl.workers.train.mcore.architecture import Architecture
from hybridrl.workers.train.mcore.megatron_core import TransformerConfig


def transformer_config(
    architecture: Architecture,
    *,
    megatron: MegatronConfig,
    engine: EngineConfig,
    device: torch.device,
) -> TransformerConfig:
    """Say to megatron-core what to compute.

    Raises:
        ConfigError: it does not take ``megatron.transformer_args``, or refuses the whole.
    """
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
        "add_bias_linear": architecture.has_linear_bias,
        "normalization": "RMSNorm",
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
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_parallel_size,
        "expert_tensor_parallel_size": megatron.expert_tensor_parallel_size,
        "variable_seq_lengths": megatron.pipeline_parallel_size > 1,
        "moe_token_dispatcher_type": "alltoall",  # the one that takes packs of any length
        # Token weights are shares of the global loss: gradients are summed, never averaged.
        "calculate_per_token_loss": True,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,  # weights come from files
        "gradient_accumulation_fusion": False,
        "cuda_graph_scope": [],  # the default warns that it is deprecated
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
    }
    if megatron.num_virtual_stages > 1:
        arguments |= {
            "virtual_pipeline_model_parallel_size": megatron.num_virtual_stages,
            "microbatch_group_size_per_vp_stage": megatron.pipeline_parallel_size,
            # Of two ranks each is the other's last and next: batched messages would be mixed up.
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    if engine.gradient_checkpointing:
        arguments |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    arguments |= _experts(architecture)
    try:
        return TransformerConfig(**arguments | dict(megatron.transformer_args))
    except (TypeError, ValueError, AssertionError) as err:
        raise ConfigError(
            "megatron.transformer_args",
            dict(megatron.transformer_args),
            f"megatron-core refuses it: {err}",
            "see the fields of megatron.core.transformer.TransformerConfig",
        ) from err


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
