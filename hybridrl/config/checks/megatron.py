"""Rules about models that train on megatron-core; silent without such a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec

from hybridrl.config.architecture import find_architecture
from hybridrl.config.checks.megatron_args import keys_of_transformer_engine
from hybridrl.config.checks.parallel_sizes import check_parallel_sizes
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.spelling import resetting, to_override
from hybridrl.errors import ConfigError, instruction

INSTALL_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'hybridrl[transformer-engine]'"
"""Without isolation: else pip would compile it for the newest torch instead of the installed."""

UNUSED = MegatronConfig(
    tensor_parallel_size=1,
    sequence_parallel=False,
    pipeline_parallel_size=1,
    num_virtual_stages=1,
    num_layers_in_first_stage=None,
    num_layers_in_last_stage=None,
    context_parallel_size=1,
    expert_parallel_size=1,
    expert_tensor_parallel_size=1,
    layers="auto",
    attention="auto",
    recompute_modules=(),
    overlap_communication="auto",
    load_balance_coefficient=0.0,
    replay_routing=False,
    transformer_args={},
    optimizer_args={},
    ddp_args={},
)
"""The section with the defaults of hydra_configs/megatron/default.yaml."""


def check_megatron_is_used(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The section is changed only if a model trains on megatron-core."""
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
                "would be ignored: no model of this run trains with engine=megatron",
                remedies=[reset],
                fix=f"{instruction(reset)}, or set actor=megatron",
            )


def check_megatron_is_installed(config: ExperimentConfig) -> Iterator[ConfigError]:
    """megatron-core is an extra: a missing one is reported here and not by the workers.

    ``mode=check`` may run on another machine than the run; its report names what it did not check.
    """
    if not config.megatron_worlds or config.mode in ("check", "plan"):
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


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed, without importing it."""
    return find_spec("transformer_engine") is not None


def check_layer_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The requested kernels are installed and run on the device.

    ``mode=check`` may run on another machine than the run; its rehearsal names missing packages.
    """
    if not config.megatron_worlds:
        return
    is_cuda = config.cluster.device == "cuda"
    is_elsewhere = config.mode in ("check", "plan")
    missing = ""
    if not is_cuda:
        missing = "runs on CUDA alone, and cluster.device=cpu"
    elif not has_transformer_engine() and not is_elsewhere:
        missing = "is not installed"
    if missing:
        yield from _needs_transformer_engine(config, missing)
    if config.megatron.layers == "local":
        yield from _few_bits(config)
    if config.megatron.layers == "local" and config.megatron.attention == "transformer_engine":
        yield ConfigError(
            "megatron.attention",
            config.megatron.attention,
            "TransformerEngine's attention comes with its layers, and megatron.layers=local",
            remedies=[("megatron.attention=auto",), ("megatron.attention=packed",)],
        )
    if config.megatron.overlap_communication is True and not is_cuda:
        yield ConfigError(
            "megatron.overlap_communication",
            got=True,
            rule="collectives overlap with computation on CUDA streams, and cluster.device=cpu",
            remedies=[("megatron.overlap_communication=auto",)],
        )


def _needs_transformer_engine(config: ExperimentConfig, missing: str) -> Iterator[ConfigError]:
    how = "" if config.cluster.device == "cpu" else f"{INSTALL_TRANSFORMER_ENGINE}, or "
    for key, value in keys_of_transformer_engine(config.megatron).items():
        if value == "transformer_engine":
            other = "local" if key == "megatron.layers" else "packed"
            remedies = [(f"{key}=auto",), (f"{key}={other}",)]
            fix = f"set {key}=auto, or set {key}={other}"
            yield ConfigError(
                key, value, f"TransformerEngine {missing}", f"{how}{fix}", remedies=remedies
            )
        elif config.megatron.layers != "local" or "transformer_args" not in key:
            rule = f"it is TransformerEngine's, which {missing}"
            fix = f"{how}leave it out, or add ~{key}"
            yield ConfigError(key, value, rule, fix, remedies=[(f"~{key}",)])


def _few_bits(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Matrix products in 8 and 4 bits need TransformerEngine."""
    for key, value in keys_of_transformer_engine(config.megatron).items():
        if key.startswith("megatron.transformer_args."):
            yield ConfigError(
                key,
                value,
                "such matrix products need TransformerEngine's layers, and megatron.layers=local",
                fix=f"leave it out, or add ~{key}",
                remedies=[(f"~{key}",)],
            )


def check_recompute_modules(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The modules to recompute exist in the model, and recomputation is on."""
    key, modules = "megatron.recompute_modules", config.megatron.recompute_modules
    if not config.megatron_worlds or not modules:
        return
    keys = [key_of for key_of, is_on in _checkpointing(config).items() if not is_on]
    if len(keys) == len(_checkpointing(config)):
        yield ConfigError(
            key,
            [*modules],
            f"would be ignored, because {keys[0]}=false",
            remedies=[(f"{key}=[]",), (f"{keys[0]}=true",)],
        )
    lacking = [*_lacking_modules(config)]
    if lacking:
        kept = [module for module in modules if module not in dict(lacking)]
        yield ConfigError(
            key,
            [*modules],
            "; ".join(f"{module} needs {what}" for module, what in lacking),
            remedies=[(f"{key}=[{','.join(kept)}]",)] if kept else [(f"{key}=[]",)],
        )


def _checkpointing(config: ExperimentConfig) -> dict[str, bool]:
    """Return whether models on megatron-core recompute anything, by key."""
    keys = {}
    if config.actor.engine == "megatron":
        keys["actor.gradient_checkpointing"] = config.actor.gradient_checkpointing
    if config.has_critic and config.critic.engine == "megatron":
        keys["critic.gradient_checkpointing"] = config.critic.gradient_checkpointing
    return keys


def _lacking_modules(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    modules, model = config.megatron.recompute_modules, find_architecture(config.model)
    has_experts = model is None or model.experts is not None
    is_fused = config.cluster.device == "cuda" and config.megatron.layers != "local"
    if "moe" in modules and not has_experts:
        yield "moe", "a model with experts"
    if "moe_act" in modules and not (has_experts and is_fused):
        yield "moe_act", "experts grouped by TransformerEngine"
    if "layernorm" in modules and not is_fused:
        yield "layernorm", "TransformerEngine, which megatron-core asks when it recomputes one"


def check_master_weights(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The optimizer keeps float32 weights; a frozen base beside adapters needs none."""
    trains_policy = config.actor.engine == "megatron" and not config.lora.enabled
    trains_critic = config.has_critic and config.critic.engine == "megatron"
    if config.model.dtype != "float32" and (trains_policy or trains_critic):
        yield ConfigError(
            "model.dtype",
            config.model.dtype,
            "megatron-core's optimizer keeps trained weights in float32; they compute in "
            "actor.compute_dtype (critic.compute_dtype)",
            remedies=[("model.dtype=float32",)],
        )


def check_routing(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only layers with experts have routes to balance or to replay."""
    megatron, model = config.megatron, find_architecture(config.model)
    if not config.megatron_worlds or model is None or model.experts is not None:
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
                remedies=[(f"megatron.{name}={to_override(off)}",)],
            )


def check_routing_replay(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A replay of routes needs recorded routes."""
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
        f"{to_override(rollout.routed_experts)} does not return the experts that it used",
        remedies=[records, ("megatron.replay_routing=false",)],
    )


def check_routes_were_sampled(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Examples in a file have no recorded routes. For modes that learn from a data set."""
    if config.megatron_worlds and config.megatron.replay_routing:
        yield ConfigError(
            "megatron.replay_routing",
            got=True,
            rule=f"mode={config.mode} learns from a file, which holds no routes of experts",
            remedies=[("megatron.replay_routing=false",)],
        )


def _engine_key(config: ExperimentConfig) -> str:
    return "actor.engine" if config.actor.engine == "megatron" else "critic.engine"


RULES = (
    check_megatron_is_used,
    check_megatron_is_installed,
    check_parallel_sizes,
    check_layer_kernels,
    check_recompute_modules,
    check_master_weights,
    check_routing,
)
