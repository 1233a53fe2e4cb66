"""Rules about training engines: FSDP2, and megatron-core, silent without such a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

from hybridrl.config.actor import FSDP2Config
from hybridrl.config.checks.batch_sizes import check_parallel_sizes
from hybridrl.config.checks.megatron_args import keys_of_transformer_engine
from hybridrl.config.checks.messages import error, unused_keys
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import LIGER_MODEL_TYPES
from hybridrl.errors import ConfigError
from hybridrl.models.architecture import find_architecture

INSTALL_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'hybridrl[transformer-engine]'"
"""Without isolation: else pip would compile it for the newest torch instead of the installed."""


def check_megatron_is_used(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The section is changed only if a model trains on megatron-core, which is installed then.

    ``mode=check`` may run on another machine than the run; its report names what it did not check.
    """
    if not config.megatron_worlds:
        why = ": no model of this run trains with engine=megatron"
        yield from unused_keys(config, "megatron", MegatronConfig(), why, "set actor=megatron")
        return
    is_elsewhere = config.mode in ("check", "plan")
    is_installed = find_spec("megatron") is not None and find_spec("megatron.core") is not None
    if not is_installed and not is_elsewhere:
        key, fix = "actor.engine", "pip install 'hybridrl[megatron]', or set actor.engine=fsdp2"
        yield error(config, key, "megatron-core is not installed", f"{key}=fsdp2", fix=fix)


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed, without importing it."""
    return find_spec("transformer_engine") is not None


def check_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The requested kernels are installed and run on the device.

    ``mode=check`` may run on another machine than the run; its rehearsal names missing packages.
    """
    if not config.megatron_worlds:
        return
    if config.cluster.device != "cuda":
        yield from _needs_transformer_engine(config, "runs on CUDA alone, and cluster.device=cpu")
        if config.megatron.overlap_communication is True:
            key = "megatron.overlap_communication"
            rule = "collectives overlap with computation on CUDA streams, and cluster.device=cpu"
            yield error(config, key, rule, f"{key}=auto")
    elif not has_transformer_engine() and config.mode not in ("check", "plan"):
        yield from _needs_transformer_engine(config, "is not installed")
    if config.megatron.layers == "local":
        yield from _needs_its_layers(config)


def _needs_its_layers(config: ExperimentConfig) -> Iterator[ConfigError]:
    for key in keys_of_transformer_engine(config.megatron):
        if key.startswith("megatron.transformer_args."):
            rule = "such matrix products need TransformerEngine's layers, and megatron.layers=local"
            yield error(config, key, rule, f"~{key}", fix=f"leave it out, or add ~{key}")
        elif key == "megatron.attention":
            rule = "TransformerEngine's attention comes with its layers, and megatron.layers=local"
            yield error(config, key, rule, f"{key}=auto", f"{key}=packed")


def _needs_transformer_engine(config: ExperimentConfig, missing: str) -> Iterator[ConfigError]:
    how = "" if config.cluster.device == "cpu" else f"{INSTALL_TRANSFORMER_ENGINE}, or "
    for key, value in keys_of_transformer_engine(config.megatron).items():
        if value == "transformer_engine":
            other = "local" if key == "megatron.layers" else "packed"
            fix = f"{how}set {key}=auto, or set {key}={other}"
            rule = f"TransformerEngine {missing}"
            yield error(config, key, rule, f"{key}=auto", f"{key}={other}", fix=fix)
        elif config.megatron.layers != "local" or "transformer_args" not in key:
            rule = f"it is TransformerEngine's, which {missing}"
            yield error(config, key, rule, f"~{key}", fix=f"{how}leave it out, or add ~{key}")


def check_recompute_modules(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The modules to recompute exist in the model, and recomputation is on."""
    key, modules = "megatron.recompute_modules", config.megatron.recompute_modules
    if not config.megatron_worlds or not modules:
        return
    if not config.actor.gradient_checkpointing:
        switch = "actor.gradient_checkpointing"
        rule = f"would be ignored, because {switch}=false"
        yield error(config, key, rule, f"{key}=[]", f"{switch}=true")
    lacking = _lacking_modules(config)
    if lacking:
        rule = "; ".join(f"{module} needs {what}" for module, what in lacking.items())
        kept = [module for module in modules if module not in lacking]
        yield error(config, key, rule, f"{key}=[{','.join(kept)}]")


def _lacking_modules(config: ExperimentConfig) -> dict[str, str]:
    modules, model = config.megatron.recompute_modules, find_architecture(config.model)
    has_experts = model is None or model.experts is not None
    is_fused = config.cluster.device == "cuda" and config.megatron.layers != "local"
    lacking = {}
    if "moe" in modules and not has_experts:
        lacking["moe"] = "a model with experts"
    if "moe_act" in modules and not (has_experts and is_fused):
        lacking["moe_act"] = "experts grouped by TransformerEngine"
    if "layernorm" in modules and not is_fused:
        lacking["layernorm"] = "TransformerEngine, which megatron-core asks when it recomputes one"
    return lacking


def check_master_weights(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The optimizer keeps float32 weights; a frozen base beside adapters needs none."""
    trains_all = not config.lora.enabled or config.has_critic
    if config.megatron_worlds and config.model.dtype != "float32" and trains_all:
        rule = (
            "megatron-core's optimizer keeps trained weights in float32; they compute in "
            "actor.compute_dtype"
        )
        yield error(config, "model.dtype", rule, "model.dtype=float32")


def check_load_balance(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Only layers with experts have routes to balance."""
    model, key = find_architecture(config.model), "megatron.load_balance_coefficient"
    is_dense = model is not None and model.experts is None
    if config.megatron_worlds and is_dense and config.megatron.load_balance_coefficient:
        yield error(config, key, "the model has no experts to route tokens to", f"{key}=0.0")


def check_fsdp2(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Keys are changed only where a model trains on FSDP2, whose copies have equal ranks."""
    key, number = "actor.fsdp2.num_replicas", config.actor.fsdp2.num_replicas
    worlds = {config.cluster.num_ranks, config.num_critic_ranks if config.has_critic else 0} - {0}
    if config.actor.engine != "fsdp2":
        why = f", because actor.engine={config.actor.engine}"
        yield from unused_keys(config, "actor.fsdp2", FSDP2Config(), why, "actor=fsdp2")
    elif any(num_ranks % number for num_ranks in worlds):
        counts = " and ".join(map(str, sorted(worlds)))
        rule = f"must divide the number of ranks that train a model, {counts}"
        yield error(config, key, rule, f"{key}={math.gcd(number, *worlds)}")


def check_fsdp2_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Liger's kernels need CUDA and an extra package; a compiler does not know those of experts."""
    model, options = find_architecture(config.model), config.actor.fsdp2
    key, compiled = "actor.fsdp2.liger_kernels", "actor.fsdp2.compile_blocks"
    off = f"{key}=false"
    if options.liger_kernels and config.cluster.device != "cuda":
        rule = f"runs on CUDA alone, and cluster.device={config.cluster.device}"
        yield error(config, key, rule, off)
    elif options.liger_kernels and model and model.model_type not in LIGER_MODEL_TYPES:
        rule = f"is shown for {', '.join(LIGER_MODEL_TYPES)}, and this is {model.model_type}"
        yield error(config, key, rule, off)
    elif options.liger_kernels and find_spec("liger_kernel") is None:
        fix = f"pip install liger-kernel, or set {off}"
        yield error(config, key, "liger-kernel is not installed", off, fix=fix)
    if options.liger_kernels and options.compile_blocks:
        yield error(config, key, f"{compiled}=true fuses the same operations", off)
    # Seen with torch 2.13.
    if options.compile_blocks and model is not None and model.experts is not None:
        rule = f"the products of {model.model_type}'s experts do not compile"
        yield error(config, compiled, rule, f"{compiled}=false")


RULES = (
    check_megatron_is_used,
    check_parallel_sizes,
    check_kernels,
    check_recompute_modules,
    check_master_weights,
    check_load_balance,
)

FSDP2_RULES = (check_fsdp2, check_fsdp2_kernels)
