"""Rules about what is handed on to megatron-core by its own names: what no run of ours can take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridrl.config.checks.passed_arguments import Reasons, refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.megatron import MegatronConfig
from hybridrl.errors import ConfigError

_SPLIT = "megatron.num_layers_in_first_stage and num_layers_in_last_stage"
_RECOMPUTED = "actor.gradient_checkpointing with megatron.recompute_modules"
_OVERLAPPED = "megatron.overlap_communication"

_TRANSFORMER_TYPED: Reasons = {
    "tensor_model_parallel_size": "megatron.tensor_parallel_size",
    "sequence_parallel": "megatron.sequence_parallel",
    "pipeline_model_parallel_size": "megatron.pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "megatron.num_virtual_stages",
    "context_parallel_size": "megatron.context_parallel_size",
    "expert_model_parallel_size": "megatron.expert_parallel_size",
    "expert_tensor_parallel_size": "megatron.expert_tensor_parallel_size",
    "transformer_impl": "megatron.layers",
    "moe_grouped_gemm": "megatron.layers",
    "attention_backend": "megatron.attention",
    "moe_aux_loss_coeff": "megatron.load_balance_coefficient",
    "moe_router_load_balancing_type": "megatron.load_balance_coefficient",
    "moe_enable_routing_replay": "megatron.replay_routing",
    "bf16": "actor.compute_dtype",
    "fp16": "actor.compute_dtype",
    "params_dtype": "actor.compute_dtype",
    "pipeline_dtype": "actor.compute_dtype",
    "enable_autocast": "actor.compute_dtype",
    "autocast_dtype": "actor.compute_dtype",
    "recompute_granularity": _RECOMPUTED,
    "recompute_method": _RECOMPUTED,
    "recompute_num_layers": _RECOMPUTED,
    "recompute_modules": _RECOMPUTED,
    "moe_layer_recompute": _RECOMPUTED,
    "num_layers_in_first_pipeline_stage": _SPLIT,
    "num_layers_in_last_pipeline_stage": _SPLIT,
    "account_for_embedding_in_pipeline_split": _SPLIT,
    "account_for_loss_in_pipeline_split": _SPLIT,
    "pipeline_model_parallel_layout": _SPLIT,
}

_OF_THE_MODEL = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "window_size"),
        *("num_attention_heads", "num_query_groups", "qk_layernorm", "multi_latent_attention"),
        *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func"),
        *("rotary_interleaved", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
        *("moe_layer_freq", "moe_router_pre_softmax", "moe_router_score_function"),
        *("moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_limited_devices"),
        *("moe_router_enable_expert_bias", "mtp_num_layers", "no_rope_freq", "softmax_type"),
        *("experimental_attention_variant", "attention_output_gate", "softmax_scale"),
        *("heterogeneous_block_specs", "is_hybrid_model", "apply_query_key_layer_scaling"),
        *("apply_residual_connection_post_layernorm", "qk_l2_norm", "moe_latent_size"),
        *("moe_shared_expert_gate", "mrope_section", "moe_apply_probs_on_input"),
    }
)
"""Fields of TransformerConfig that follow from the model's config.json."""

_SAME_POLICY = "the policy that is trained would not be the one that sampled"
_COMPUTED = "weights are loaded, exported and saved in the type that is computed in"
_FILES = "weights are read from the model folder"
_LENGTHS = "packs differ in length, and it takes one length"
_GPT_MODEL = "it belongs to megatron-core's whole GPTModel, and embedding and head here are ours"
_ASLEEP = "rollout.sleep moves training state, and it would no longer know where it is"
_FUNCTION = "it is a function of the engine"

_TRANSFORMER_OURS: Reasons = {
    "calculate_per_token_loss": "losses come weighed, so gradients are summed",
    "variable_seq_lengths": "micro-batches differ in length",
    "hidden_dropout": _SAME_POLICY,
    "attention_dropout": _SAME_POLICY,
    "moe_input_jitter_eps": _SAME_POLICY,
    "moe_token_dropping": _SAME_POLICY,
    "moe_expert_capacity_factor": _SAME_POLICY,
    "moe_pad_expert_input_to_capacity": _SAME_POLICY,
    "moe_router_force_load_balancing": _SAME_POLICY,
    "moe_z_loss_coeff": "it would be added up over micro-batches, and ranks, instead of averaged",
    "moe_router_fusion": "its kernel chooses experts by itself, and cannot replay any",
    "moe_use_legacy_grouped_gemm": "its tensors of all experts are no tensors of the model's files",
    "perform_initialization": _FILES,
    "use_cpu_initialization": _FILES,
    "init_model_with_meta_device": _FILES,
    "fp8_param": _COMPUTED,
    "fp4_param": _COMPUTED,
    "cpu_offloading": _ASLEEP,
    "fine_grained_activation_offloading": _GPT_MODEL,
    "overlap_moe_expert_parallel_comm": _GPT_MODEL,
    "delay_wgrad_compute": _GPT_MODEL,
    "defer_embedding_wgrad_compute": _GPT_MODEL,
    "cross_entropy_loss_fusion": _GPT_MODEL,
    "cross_entropy_fusion_impl": _GPT_MODEL,
    "num_microbatches_with_partial_activation_checkpoints": _GPT_MODEL,
    "tp_comm_overlap": _LENGTHS,
    "fused_single_qkv_rope": "it takes no packs",
    "cuda_graph_impl": _LENGTHS,
    "enable_cuda_graph": _LENGTHS,
    "external_cuda_graph": _LENGTHS,
    "microbatch_group_size_per_vp_stage": "packs come in groups of pipeline_parallel_size",
    "finalize_model_grads_func": _FUNCTION,
    "grad_scale_func": _FUNCTION,
    "no_sync_func": _FUNCTION,
    "grad_sync_func": _FUNCTION,
    "param_sync_func": _FUNCTION,
}

_DISPATCHERS = ("alltoall", "flex")
"""Those that take other numbers of tokens from each rank."""

_OPTIMIZER_TYPED: Reasons = {
    "lr": "actor.optimizer.lr",
    "min_lr": "actor.optimizer.min_lr_ratio",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.beta1",
    "adam_beta2": "actor.optimizer.beta2",
    "adam_eps": "actor.optimizer.eps",
    "clip_grad": "actor.optimizer.max_grad_norm",
    "bf16": "actor.compute_dtype",
    "fp16": "actor.compute_dtype",
    "params_dtype": "actor.compute_dtype",
    "main_grads_dtype": "actor.reduce_dtype",
    "overlap_param_gather": _OVERLAPPED,
    "overlap_param_gather_with_optimizer_step": _OVERLAPPED,
}

_ADAMW = "steps are AdamW's, whose moments a checkpoint holds"
_NO_SCALE = "losses are not scaled: bfloat16 has the range of float32"
_WHOLE_MASTERS = "a checkpoint holds float32 weights, which other engines and sizes go on from"

_OPTIMIZER_OURS: Reasons = {
    "optimizer": _ADAMW,
    "decoupled_weight_decay": _ADAMW,
    "decoupled_lr": "all weights follow one schedule",
    "decoupled_min_lr": "all weights follow one schedule",
    "apply_wd_to_qk_layernorm": "weight decay is not applied to vectors",
    "use_distributed_optimizer": "data-parallel ranks share the optimizer's state",
    "main_params_dtype": _WHOLE_MASTERS,
    "store_param_remainders": _WHOLE_MASTERS,
    "fp8_recipe": _COMPUTED,
    "reuse_grad_buf_for_mxfp8_param_ag": _COMPUTED,
    "loss_scale": _NO_SCALE,
    "initial_loss_scale": _NO_SCALE,
    "timers": _FUNCTION,
}

_MOMENT_TYPES = ("float32", "bfloat16")

_DDP_TYPED: Reasons = {
    "grad_reduce_in_fp32": "actor.reduce_dtype",
    "overlap_grad_reduce": _OVERLAPPED,
    "overlap_param_gather": _OVERLAPPED,
    "align_param_gather": _OVERLAPPED,
}

_DDP_OURS: Reasons = {
    "use_distributed_optimizer": "data-parallel ranks share the optimizer's state",
    "num_distributed_optimizer_instances": "all data-parallel ranks share the optimizer's state",
    "average_in_collective": "losses come weighed, so gradients are summed",
    "use_megatron_fsdp": "actor=fsdp2 is the engine that shards so",
    "use_custom_fsdp": "actor=fsdp2 is the engine that shards so",
    "data_parallel_sharding_strategy": "actor=fsdp2 is the engine that shards so",
    "nccl_ub": "gradients have memory within a step alone, and NCCL would keep the old address",
    "fp8_param_gather": _COMPUTED,
    "reuse_grad_buf_for_mxfp8_param_ag": _COMPUTED,
    "delay_wgrad_compute": _GPT_MODEL,
}


_FEW_BITS = ("fp8", "fp4")
_SMALL_STATE = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype")


def keys_of_transformer_engine(megatron: MegatronConfig) -> dict[str, ArgumentValue]:
    """Return what is asked for by key that TransformerEngine alone does."""
    keys: dict[str, ArgumentValue] = {}
    if megatron.layers == "transformer_engine":
        keys["megatron.layers"] = megatron.layers
    if megatron.attention == "transformer_engine":
        keys["megatron.attention"] = megatron.attention
    for name in _FEW_BITS:
        if megatron.transformer_args.get(name):
            keys[f"megatron.transformer_args.{name}"] = megatron.transformer_args[name]
    if megatron.optimizer_args.get(_SMALL_STATE[0]):
        keys[f"megatron.optimizer_args.{_SMALL_STATE[0]}"] = True
    return keys


def without_transformer_engine(megatron: MegatronConfig) -> MegatronConfig:
    """Return the section without what ``keys_of_transformer_engine`` names."""
    return replace(
        megatron,
        layers="local",
        attention="packed",
        transformer_args={
            name: value
            for name, value in megatron.transformer_args.items()
            if not name.startswith(_FEW_BITS)
        },
        optimizer_args={
            name: value
            for name, value in megatron.optimizer_args.items()
            if name not in _SMALL_STATE
        },
    )


def check_transformer_args(config: ExperimentConfig) -> Iterator[ConfigError]:
    """What has a key of its own is typed there; else two keys would say different things.

    Names that megatron-core does not know are told by ``mode=check``, which asks it.
    """
    if not config.megatron_worlds:
        return
    given, section = config.megatron.transformer_args, "megatron.transformer_args"
    yield from refuse_own_arguments(
        given, section, typed=_TRANSFORMER_TYPED, taken=_TRANSFORMER_OURS
    )
    for name, value in given.items():
        key = f"{section}.{name}"
        if name in _OF_THE_MODEL:
            rule = "the model's config.json says that"
            fix = f"set model.path to a model of that shape, and ~{key}"
            yield ConfigError(key, value, rule, fix, remedies=[(f"~{key}",)])
        elif name == "moe_token_dispatcher_type" and value not in _DISPATCHERS:
            yield ConfigError(
                key,
                value,
                "ranks differ in their numbers of tokens, which of megatron-core's dispatchers "
                f"{' and '.join(_DISPATCHERS)} alone take",
                remedies=[(f"~{key}",)],
            )


def check_optimizer_args(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Likewise of its OptimizerConfig; and what it keeps is kept where and as we can save it."""
    if not config.megatron_worlds:
        return
    given, section = config.megatron.optimizer_args, "megatron.optimizer_args"
    yield from refuse_own_arguments(given, section, typed=_OPTIMIZER_TYPED, taken=_OPTIMIZER_OURS)
    offload = f"{section}.optimizer_cpu_offload"
    if given.get("optimizer_cpu_offload") and config.cluster.device == "cpu":
        rule = "the optimizer is on the host already, for cluster.device=cpu"
        fix = f"leave it out, or add ~{offload}"
        yield ConfigError(offload, got=True, rule=rule, fix=fix, remedies=[(f"~{offload}",)])
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(name) not in (None, *_MOMENT_TYPES):
            yield ConfigError(
                f"{section}.{name}",
                given[name],
                f"must be {' or '.join(_MOMENT_TYPES)}: of others megatron-core keeps scaled "
                "values, which no other engine goes on from",
                remedies=[(f"~{section}.{name}",)],
            )


def check_ddp_args(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Likewise of its DistributedDataParallelConfig."""
    if config.megatron_worlds:
        yield from refuse_own_arguments(
            config.megatron.ddp_args, "megatron.ddp_args", typed=_DDP_TYPED, taken=_DDP_OURS
        )
