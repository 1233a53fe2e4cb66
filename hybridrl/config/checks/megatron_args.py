"""Rules about arguments passed to megatron-core by its own names: those that no run can use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hybridrl.config.checks.messages import by_argument, error, refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.megatron import MegatronConfig
from hybridrl.errors import ConfigError

_OVERLAPPED = "megatron.overlap_communication"

_TRANSFORMER_TYPED = by_argument(
    {
        "megatron.tensor_parallel_size": "tensor_model_parallel_size",
        "megatron.sequence_parallel": "sequence_parallel",
        "megatron.pipeline_parallel_size": "pipeline_model_parallel_size",
        "megatron.num_virtual_stages": "virtual_pipeline_model_parallel_size",
        "megatron.context_parallel_size": "context_parallel_size",
        "megatron.expert_parallel_size": "expert_model_parallel_size",
        "megatron.expert_tensor_parallel_size": "expert_tensor_parallel_size",
        "megatron.layers": "transformer_impl moe_grouped_gemm",
        "megatron.attention": "attention_backend",
        "megatron.load_balance_coefficient": "moe_aux_loss_coeff moe_router_load_balancing_type",
        "actor.replay_routing": "moe_enable_routing_replay",
        "actor.compute_dtype": (
            "bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype"
        ),
        "actor.gradient_checkpointing with megatron.recompute_modules": (
            "recompute_granularity recompute_method recompute_num_layers recompute_modules "
            "moe_layer_recompute"
        ),
        "megatron.num_layers_in_first_stage and num_layers_in_last_stage": (
            "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
            "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
            "pipeline_model_parallel_layout"
        ),
    }
)

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

_COMPUTED = "weights are loaded, exported and saved in the type that computes"

_GPT_MODEL = "it belongs to megatron-core's GPTModel, and hybridrl has its own embedding and head"

_TRANSFORMER_OURS = by_argument(
    {
        "losses come weighed, so gradients are summed": "calculate_per_token_loss",
        "micro-batches differ in length": "variable_seq_lengths",
        "the policy that is trained would not be the one that sampled": (
            "hidden_dropout attention_dropout moe_input_jitter_eps moe_token_dropping "
            "moe_expert_capacity_factor moe_router_force_load_balancing"
        ),
        "it would be added up over micro-batches, and ranks, instead of averaged": (
            "moe_z_loss_coeff"
        ),
        "its kernel chooses experts by itself, and cannot replay any": "moe_router_fusion",
        "the model's files have no tensors that hold all experts": "moe_use_legacy_grouped_gemm",
        "weights are read from the model folder": (
            "perform_initialization use_cpu_initialization init_model_with_meta_device"
        ),
        _COMPUTED: "fp8_param fp4_param",
        "rollout.sleep moves training state, and it would use the old address": "cpu_offloading",
        _GPT_MODEL: (
            "fine_grained_activation_offloading overlap_moe_expert_parallel_comm "
            "delay_wgrad_compute defer_embedding_wgrad_compute "
            "num_microbatches_with_partial_activation_checkpoints"
        ),
        "micro-batches differ in length, and it needs one length": (
            "tp_comm_overlap cuda_graph_impl enable_cuda_graph external_cuda_graph"
        ),
        "it does not support packed rows": "fused_single_qkv_rope",
        "its size is megatron.pipeline_parallel_size": "microbatch_group_size_per_vp_stage",
    }
)

_DISPATCHERS = ("alltoall", "flex")
"""Those that need a different number of tokens from each rank."""

_OPTIMIZER_TYPED = by_argument(
    {
        "actor.optimizer.lr": "lr",
        "actor.optimizer.min_lr_ratio": "min_lr",
        "actor.optimizer.weight_decay": "weight_decay",
        "actor.optimizer.beta1": "adam_beta1",
        "actor.optimizer.beta2": "adam_beta2",
        "actor.optimizer.eps": "adam_eps",
        "actor.optimizer.max_grad_norm": "clip_grad",
        "actor.compute_dtype": "bf16 fp16 params_dtype",
        "actor.reduce_dtype": "main_grads_dtype",
        _OVERLAPPED: "overlap_param_gather overlap_param_gather_with_optimizer_step",
    }
)


_OPTIMIZER_OURS = by_argument(
    {
        "steps are AdamW's, whose moments a checkpoint holds": "optimizer decoupled_weight_decay",
        "all weights follow one schedule": "decoupled_lr decoupled_min_lr",
        "weight decay is not applied to vectors": "apply_wd_to_qk_layernorm",
        "data-parallel ranks share the optimizer's state": "use_distributed_optimizer",
        "a checkpoint holds float32 weights, from which other engines and sizes resume": (
            "main_params_dtype store_param_remainders"
        ),
        _COMPUTED: "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag",
        "losses are not scaled: bfloat16 has the range of float32": "loss_scale",
    }
)

_MOMENT_TYPES = ("float32", "bfloat16")

_DDP_TYPED = by_argument(
    {
        "actor.reduce_dtype": "grad_reduce_in_fp32",
        _OVERLAPPED: "overlap_grad_reduce overlap_param_gather align_param_gather",
    }
)

_DDP_OURS = by_argument(
    {
        "data-parallel ranks share the optimizer's state": "use_distributed_optimizer",
        "all data-parallel ranks share the optimizer's state": (
            "num_distributed_optimizer_instances"
        ),
        "losses come weighed, so gradients are summed": "average_in_collective",
        "actor=fsdp2 is the engine that shards so": (
            "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy"
        ),
        "gradient memory lasts for one step, and NCCL would keep the old address": "nccl_ub",
        _COMPUTED: "fp8_param_gather",
        _GPT_MODEL: "delay_wgrad_compute",
    }
)


_FEW_BITS = ("fp8", "fp4")
PRECISION_AWARE = "use_precision_aware_optimizer"
_SMALL_STATE = (PRECISION_AWARE, "exp_avg_dtype", "exp_avg_sq_dtype")


def keys_of_transformer_engine(megatron: MegatronConfig) -> dict[str, ArgumentValue]:
    """Return the requests, by key, that only TransformerEngine can serve."""
    keys: dict[str, ArgumentValue] = {}
    if megatron.layers == "transformer_engine":
        keys["megatron.layers"] = megatron.layers
    if megatron.attention == "transformer_engine":
        keys["megatron.attention"] = megatron.attention
    for name in _FEW_BITS:
        if megatron.transformer_args.get(name):
            keys[f"megatron.transformer_args.{name}"] = megatron.transformer_args[name]
    if megatron.optimizer_args.get(PRECISION_AWARE):
        keys[f"megatron.optimizer_args.{PRECISION_AWARE}"] = True
    return keys


def without_transformer_engine(megatron: MegatronConfig) -> MegatronConfig:
    """Return the section without the keys of ``keys_of_transformer_engine``."""
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


def check_passed_arguments(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Arguments with a key are set by that key alone; others change neither model nor objective.

    ``mode=check`` reports what megatron-core refuses; it asks megatron-core itself.
    """
    if not config.megatron_worlds:
        return
    for section, typed, taken in (
        ("megatron.transformer_args", _TRANSFORMER_TYPED, _TRANSFORMER_OURS),
        ("megatron.optimizer_args", _OPTIMIZER_TYPED, _OPTIMIZER_OURS),
        ("megatron.ddp_args", _DDP_TYPED, _DDP_OURS),
    ):
        yield from refuse_own_arguments(config, section, typed=typed, taken=taken)
    for name, value in config.megatron.transformer_args.items():
        key = f"megatron.transformer_args.{name}"
        if name in _OF_THE_MODEL:
            fix = f"set model.path to a model of that shape, and ~{key}"
            yield error(config, key, "the model's config.json sets it", f"~{key}", fix=fix)
        elif name == "moe_token_dispatcher_type" and value not in _DISPATCHERS:
            rule = (
                "ranks have different numbers of tokens; of megatron-core's dispatchers only "
                f"{' and '.join(_DISPATCHERS)} support that"
            )
            yield error(config, key, rule, f"~{key}")


def check_optimizer_state(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The state of the optimizer is where its device is, in a form that a checkpoint can save."""
    if not config.megatron_worlds:
        return
    given = config.megatron.optimizer_args
    if given.get("optimizer_cpu_offload") and config.cluster.device == "cpu":
        key = "megatron.optimizer_args.optimizer_cpu_offload"
        rule = "the optimizer is on the host already, for cluster.device=cpu"
        yield error(config, key, rule, f"~{key}", fix=f"leave it out, or add ~{key}")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if given.get(name) not in (None, *_MOMENT_TYPES):
            key = f"megatron.optimizer_args.{name}"
            rule = (
                f"must be {' or '.join(_MOMENT_TYPES)}: of others megatron-core keeps scaled "
                "values, from which no other engine resumes"
            )
            yield error(config, key, rule, f"~{key}")


RULES = (check_passed_arguments, check_optimizer_state)
