"""Rules about models that train on megatron-core; they say nothing where none does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec

from hybridrl.config.batch_sizes import BatchSizes
from hybridrl.config.critic_checks import check_critic_batch_sizes
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora_checks import model_values
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.megatron_shapes import (
    ShapeFacts,
    broken_sizes,
    nearest_shapes,
    value_of,
)
from hybridrl.config.model import MEGATRON_MODEL_TYPES
from hybridrl.config.model_checks import check_starter_warmup_batch
from hybridrl.config.spelling import resetting
from hybridrl.errors import ConfigError, instruction

UNUSED = MegatronConfig(
    tensor_parallel_size=1,
    sequence_parallel=False,
    pipeline_parallel_size=1,
    num_virtual_stages=1,
    context_parallel_size=1,
    expert_parallel_size=1,
    expert_tensor_parallel_size=1,
    layers="auto",
    overlap_communication=False,
    load_balance_coefficient=0.0,
    replay_routing=False,
    transformer_args={},
)
"""The section as it is where nobody changed it: hydra_configs/megatron/default.yaml."""

_TYPED: Mapping[str, str] = {
    "tensor_model_parallel_size": "megatron.tensor_parallel_size",
    "sequence_parallel": "megatron.sequence_parallel",
    "pipeline_model_parallel_size": "megatron.pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "megatron.num_virtual_stages",
    "context_parallel_size": "megatron.context_parallel_size",
    "expert_model_parallel_size": "megatron.expert_parallel_size",
    "expert_tensor_parallel_size": "megatron.expert_tensor_parallel_size",
    "transformer_impl": "megatron.layers",
    "moe_aux_loss_coeff": "megatron.load_balance_coefficient",
    "moe_router_load_balancing_type": "megatron.load_balance_coefficient",
    "moe_enable_routing_replay": "megatron.replay_routing",
    "bf16": "actor.compute_dtype",
    "fp16": "actor.compute_dtype",
    "params_dtype": "actor.compute_dtype",
    "pipeline_dtype": "actor.compute_dtype",
    "enable_autocast": "actor.compute_dtype",
    "autocast_dtype": "actor.compute_dtype",
    "recompute_granularity": "actor.gradient_checkpointing",
    "recompute_method": "actor.gradient_checkpointing",
    "recompute_num_layers": "actor.gradient_checkpointing",
}
"""Fields of TransformerConfig that follow from a key of ours."""

_OF_THE_MODEL = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "kv_channels", "window_size"),
        *("num_attention_heads", "num_query_groups", "qk_layernorm", "multi_latent_attention"),
        *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func"),
        *("rotary_interleaved", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
        *("moe_layer_freq", "moe_router_pre_softmax", "moe_router_score_function"),
        *("moe_shared_expert_intermediate_size", "moe_router_topk_scaling_factor"),
    }
)
"""Fields that follow from the model's config.json."""

_SAME_POLICY = "the policy that is trained would not be the one that sampled"
_COMPUTED = "weights are loaded, exported and saved in the type that is computed in"
_OURS: Mapping[str, str] = {
    "calculate_per_token_loss": "losses come weighed, so gradients are summed",
    "variable_seq_lengths": "micro-batches differ in length",
    "hidden_dropout": _SAME_POLICY,
    "attention_dropout": _SAME_POLICY,
    "moe_input_jitter_eps": _SAME_POLICY,
    "moe_token_dropping": _SAME_POLICY,
    "moe_expert_capacity_factor": _SAME_POLICY,
    "moe_z_loss_coeff": "it would be added up over micro-batches, and ranks, instead of averaged",
    "moe_router_fusion": "its kernel chooses experts by itself, and cannot replay any",
    "perform_initialization": "weights are read from the model folder",
    "use_cpu_initialization": "weights are read from the model folder",
    "init_model_with_meta_device": "weights are read from the model folder",
    "fp8_param": _COMPUTED,
    "fp4_param": _COMPUTED,
    "cpu_offloading": "rollout.sleep moves training state, and it would no longer know where it is",
    "finalize_model_grads_func": "it is a function of the engine",
    "grad_scale_func": "it is a function of the engine",
    "no_sync_func": "it is a function of the engine",
    "grad_sync_func": "it is a function of the engine",
    "param_sync_func": "it is a function of the engine",
}
"""Fields that are not to be chosen, and why."""


def check_megatron_is_used(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The section is changed only where a model trains on megatron-core."""
    if config.megatron_worlds:
        return
    values = asdict(config.megatron)
    for name, usual in asdict(UNUSED).items():
        value = values[name]
        if value != usual:
            reset = resetting(f"megatron.{name}", value, usual)
            yield ConfigError(
                f"megatron.{name}",
                value,
                "would be ignored: neither actor.engine nor the engine of a critic that is asked "
                "is megatron",
                remedies=[reset],
                fix=f"{instruction(reset)}, or set actor=megatron",
            )


def check_megatron_is_installed(config: ExperimentConfig) -> Iterator[ConfigError]:
    """megatron-core is an extra: a run should not learn that it is missing from its workers."""
    if not config.megatron_worlds:
        return
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        key = _engine_key(config)
        reset = f"{key}=fsdp2"
        yield ConfigError(
            key,
            "megatron",
            "megatron-core is not installed",
            fix=f"pip install 'hybridrl[megatron]', or set {reset}",
            remedies=[(reset,)],
        )


def check_megatron_reads_the_model(config: ExperimentConfig) -> Iterator[ConfigError]:
    """There is a converter for the model's architecture."""
    model_type = model_values(config).get("model_type")
    if not config.megatron_worlds or model_type in (None, *MEGATRON_MODEL_TYPES):
        return
    yield ConfigError(
        "model.path",
        config.model.path,
        f"its model_type={model_type!r} is not converted to megatron-core: there are converters "
        f"for {', '.join(MEGATRON_MODEL_TYPES)}",
        fix="set model.path to such a model; others are to come by the extra 'bridge' "
        "(megatron-bridge), which does not exist yet",
    )


def check_parallel_sizes(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Ranks, heads, layers and experts divide: everything that does not is told at once.

    Each violation comes with the nearest shapes in which everything divides.
    """
    broken = list(broken_sizes(config, ShapeFacts.of(config)))
    if not broken:
        return
    shapes = nearest_shapes(config, is_fit=_divides_rows)
    remedies = [tuple(f"{key}={_spell(n)}" for key, n in shape.items()) for shape in shapes]
    for key, rule in broken:
        yield ConfigError(key, value_of(config, key), rule, remedies=remedies)


def _divides_rows(config: ExperimentConfig) -> bool:
    """Say whether rows divide over the data-parallel ranks that a shape leaves."""
    if next(check_starter_warmup_batch(config), None) is not None:
        return False
    if config.mode == "sft":
        return config.sft.batch_size % config.num_train_groups == 0
    # Not check_batch_sizes, which looks for remedies: this is asked of hundreds of shapes.
    return BatchSizes.of(config).are_legal and next(check_critic_batch_sizes(config), None) is None


def has_transformer_engine() -> bool:
    """Look whether TransformerEngine is installed, without importing it."""
    return find_spec("transformer_engine") is not None


def check_layer_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Kernels that are asked for are there, and run on the device."""
    if not config.megatron_worlds:
        return
    is_cuda = config.cluster.device == "cuda"
    missing = "is not installed" if is_cuda else "runs on CUDA alone, and cluster.device=cpu"
    has_kernels = is_cuda and has_transformer_engine()
    if config.megatron.layers == "transformer_engine" and not has_kernels:
        how = "pip install 'transformer-engine[pytorch]', or " if is_cuda else ""
        remedies = [("megatron.layers=auto",), ("megatron.layers=local",)]
        yield ConfigError(
            "megatron.layers",
            "transformer_engine",
            f"TransformerEngine {missing}",
            fix=f"{how}set megatron.layers=auto, or set megatron.layers=local",
            remedies=remedies,
        )
    yield from _few_bits(config, missing="" if has_kernels else missing)
    if config.megatron.overlap_communication and not is_cuda:
        yield ConfigError(
            "megatron.overlap_communication",
            got=True,
            rule="collectives overlap with computation on CUDA streams, and cluster.device=cpu",
            remedies=[("megatron.overlap_communication=false",)],
        )


def _few_bits(config: ExperimentConfig, *, missing: str) -> Iterator[ConfigError]:
    """Matrix products of 8 and 4 bits are TransformerEngine's; without it nobody would do them."""
    is_local = config.megatron.layers == "local"
    for name in ("fp8", "fp4"):
        value = config.megatron.transformer_args.get(name)
        if value and (missing or is_local):
            key = f"megatron.transformer_args.{name}"
            what = "and megatron.layers=local" if is_local else f"which {missing}"
            yield ConfigError(
                key,
                value,
                f"such matrix products are TransformerEngine's, {what}",
                fix=f"leave it out, or add ~{key}",
                remedies=[(f"~{key}",)],
            )


def check_master_weights(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The optimizer keeps float32 weights; a frozen base beside adapters needs none."""
    has_critic = config.mode != "sft" and config.has_critic
    trains_policy = config.actor.engine == "megatron" and not config.lora.enabled
    trains_critic = has_critic and config.critic.engine == "megatron"
    if config.model.dtype != "float32" and (trains_policy or trains_critic):
        yield ConfigError(
            "model.dtype",
            config.model.dtype,
            "what learns on megatron-core keeps its weights in float32 in the optimizer; they are "
            "computed with in actor.compute_dtype (critic.compute_dtype)",
            remedies=[("model.dtype=float32",)],
        )


def check_routing(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only layers with experts have routes to balance or to replay."""
    megatron, values = config.megatron, model_values(config)
    if not config.megatron_worlds or not values or values.get("num_experts"):
        return
    for name, value, off in (
        ("load_balance_coefficient", megatron.load_balance_coefficient, 0.0),
        ("replay_routing", megatron.replay_routing, False),
    ):
        if value:
            yield ConfigError(
                f"megatron.{name}",
                value,
                "the model has no experts to route tokens to",
                remedies=[(f"megatron.{name}={_spell(off)}",)],
            )


def check_routing_replay(config: ExperimentConfig) -> Iterator[ConfigError]:
    """To replay routes someone must have recorded them."""
    rollout = config.rollout
    if not config.megatron_worlds or not config.megatron.replay_routing:
        return
    if rollout.engine == "sglang" and rollout.routed_experts:
        return
    records: tuple[str, ...] = ("rollout.routed_experts=true",)
    if rollout.engine != "sglang":
        records = ("rollout=sglang", *records)
    yield ConfigError(
        "megatron.replay_routing",
        got=True,
        rule=f"rollout.engine={rollout.engine} with rollout.routed_experts="
        f"{_spell(rollout.routed_experts)} does not say which experts it used",
        remedies=[records, ("megatron.replay_routing=false",)],
    )


def check_routes_were_sampled(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Nobody recorded the routes of examples in a file. Of supervised fine-tuning alone."""
    if config.megatron_worlds and config.megatron.replay_routing:
        yield ConfigError(
            "megatron.replay_routing",
            got=True,
            rule="mode=sft learns from a file, which does not say which experts were used",
            remedies=[("megatron.replay_routing=false",)],
        )


def check_transformer_args(config: ExperimentConfig) -> Iterator[ConfigError]:
    """What has a key of its own is typed there; else two keys would say different things."""
    if not config.megatron_worlds:
        return
    for name, value in config.megatron.transformer_args.items():
        key = f"megatron.transformer_args.{name}"
        if name in _TYPED:
            rule, fix = f"{_TYPED[name]} says that", f"set {_TYPED[name]}, and ~{key}"
        elif name in _OF_THE_MODEL:
            rule = "the model's config.json says that"
            fix = f"set model.path to a model of that shape, and ~{key}"
        elif name in _OURS:
            rule, fix = f"is not to be chosen: {_OURS[name]}", f"leave it out, or add ~{key}"
        else:
            continue
        yield ConfigError(key, value, rule, fix, remedies=[(f"~{key}",)])


def _engine_key(config: ExperimentConfig) -> str:
    return "actor.engine" if config.actor.engine == "megatron" else "critic.engine"


def _spell(value: object) -> str:
    return str(value).lower()
