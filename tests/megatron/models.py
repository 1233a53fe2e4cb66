"""megatron-core's GPTModel as it is, of a Hugging Face folder: one part on each pipeline rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridrl.models.architecture import Architecture
from hybridrl.workers.train.megatron.context import ParallelRank
from hybridrl.workers.train.megatron.shard_map import padded_vocab_size
from tests.megatron.stand_ins import install


def build_local_model(architecture: Architecture, *, tp: int, pp: int, ep: int, etp: int) -> Any:
    """Build this rank's part with megatron-core's own layers, float32; all ranks call it."""
    install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    experts = architecture.experts
    sparse = (
        {}
        if experts is None
        else {
            "num_moe_experts": experts.num_experts,
            "moe_ffn_hidden_size": experts.intermediate_size,
            "moe_layer_freq": [
                int(architecture.is_sparse(layer)) for layer in range(architecture.num_layers)
            ],
            "moe_shared_expert_intermediate_size": experts.shared_size or None,
            "moe_shared_expert_gate": experts.shared_size > 0,
            "moe_router_pre_softmax": not experts.normalizes_weights,
            "moe_router_topk": experts.num_per_token,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    )
    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_size,
        ffn_hidden_size=architecture.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=architecture.has_mlp_bias,
        add_qkv_bias=architecture.has_qkv_bias,
        qk_layernorm=architecture.has_head_norms,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **sparse,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(architecture, tp_size=tp),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.is_tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    )


def this_rank() -> ParallelRank:
    """Return where megatron-core says that this process is."""
    from megatron.core import parallel_state as ps

    return ParallelRank(
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        etp_size=ps.get_expert_tensor_parallel_world_size(),
    )


def global_parameters(model: Any) -> dict[str, Tensor]:
    """Return parameters by name, their layers numbered from the first pipeline rank on."""
    named = {}
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            number = model.decoder.layers[int(local)].layer_number - 1
            name = f"decoder.layers.{number}.{rest}"
        named[name] = parameter
    return named
