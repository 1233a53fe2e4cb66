"""Rules about training engines: FSDP2, and megatron-core, silent without such a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from hybridrl.config.checks.messages import error, refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import LIGER_MODEL_TYPES
from hybridrl.errors import ConfigError, instruction
from hybridrl.models.architecture import find_architecture

INSTALL_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'hybridrl[transformer-engine]'"
"""Without isolation: else pip would compile it for the newest torch instead of the installed."""

_DISPATCHERS = ("alltoall", "flex")
"""Those that need a different number of tokens from each rank."""

_MOMENT_TYPES = ("float32", "bfloat16")

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


def check_megatron_is_installed(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Megatron-core is installed where models train on it.

    ``mode=check`` may run on another machine than the run; its report names what it did not check.
    """
    if not config.megatron_worlds:
        return
    is_elsewhere = config.mode in ("check", "plan")
    is_installed = find_spec("megatron") is not None and find_spec("megatron.core") is not None
    if not is_installed and not is_elsewhere:
        key, fix = "actor.engine", "pip install 'hybridrl[megatron]', or set actor.engine=fsdp2"
        yield error(config, key, "megatron-core is not installed", f"{key}=fsdp2", fix=fix)


def check_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The requested kernels are installed and run on the device.

    ``mode=check`` may run on another machine than the run; its rehearsal names missing packages.
    """
    if not config.megatron_worlds:
        return
    absent, how = "", f"{INSTALL_TRANSFORMER_ENGINE}, or "
    if config.cluster.device != "cuda":
        absent, how = "it runs on CUDA alone, and cluster.device=cpu", ""
    elif config.mode not in ("check", "plan") and find_spec("transformer_engine") is None:
        absent = "it is not installed"
    for key in keys_of_transformer_engine(config.megatron):
        flaw = absent
        if config.megatron.layers == "local" and not key.startswith("megatron.optimizer_args."):
            flaw, how = "it has other layers than megatron.layers=local", ""
        remedy = f"~{key}" if "_args." in key else f"{key}=auto"
        if flaw:
            rule = f"it asks for TransformerEngine, and {flaw}"
            yield error(config, key, rule, remedy, fix=f"{how}{instruction([remedy])}")


def check_master_weights(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The optimizer keeps float32 weights; a frozen base beside adapters needs none."""
    trains_all = not config.lora.enabled or config.has_critic
    if config.megatron_worlds and config.model.dtype != "float32" and trains_all:
        rule = (
            "megatron-core's optimizer keeps trained weights in float32; they compute in "
            "actor.compute_dtype"
        )
        yield error(config, "model.dtype", rule, "model.dtype=float32")


def check_passed_arguments(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Arguments with a key are set by that key alone; others change neither model nor objective.

    The state of the optimizer has a form that a checkpoint can save. What megatron-core refuses
    ``mode=check`` reports: it asks megatron-core itself.
    """
    if not config.megatron_worlds:
        return
    for name in ("transformer_args", "optimizer_args", "ddp_args"):
        yield from refuse_own_arguments(config, f"megatron.{name}")
    name = "moe_token_dispatcher_type"
    if config.megatron.transformer_args.get(name, _DISPATCHERS[0]) not in _DISPATCHERS:
        key = f"megatron.transformer_args.{name}"
        rule = (
            "ranks have different numbers of tokens; of megatron-core's dispatchers only "
            f"{' and '.join(_DISPATCHERS)} support that"
        )
        yield error(config, key, rule, f"~{key}")
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if config.megatron.optimizer_args.get(name) not in (None, *_MOMENT_TYPES):
            key = f"megatron.optimizer_args.{name}"
            rule = (
                f"must be {' or '.join(_MOMENT_TYPES)}: of others megatron-core keeps scaled "
                "values, from which no other engine resumes"
            )
            yield error(config, key, rule, f"~{key}")


def check_fsdp2(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Copies of a model have equal numbers of ranks, and so have ranks that share tokens.

    These have no layer that goes from token to token.
    """
    if config.actor.engine != "fsdp2":
        return
    worlds = {config.cluster.num_ranks, config.num_critic_ranks}
    counts = " and ".join(map(str, sorted(worlds)))
    sizes = config.actor.fsdp2
    for key, size in (
        ("actor.fsdp2.num_replicas", sizes.num_replicas),
        ("actor.fsdp2.context_parallel_size", sizes.context_parallel_size),
    ):
        if any(num_ranks % size for num_ranks in worlds):
            rule = f"must divide the number of ranks that train a model, {counts}"
            yield error(config, key, rule, f"{key}={math.gcd(size, *worlds)}")
    model = find_architecture(config.model)
    if sizes.context_parallel_size > 1 and model is not None and model.delta_net is not None:
        key = "actor.fsdp2.context_parallel_size"
        rule = f"layers with a state ({model.model_type}) need all tokens of a row on one rank"
        yield error(config, key, rule, f"{key}=1")


def check_fsdp2_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Liger's kernels need CUDA and an extra package; a compiler does not know those of experts."""
    key, kernels = "actor.fsdp2.kernels", config.actor.fsdp2.kernels
    model, device, off = find_architecture(config.model), config.cluster.device, f"{key}=eager"
    if kernels == "liger" and device != "cuda":
        yield error(config, key, f"runs on CUDA alone, and cluster.device={device}", off)
    elif kernels == "liger" and model and model.model_type not in LIGER_MODEL_TYPES:
        rule = f"is shown for {', '.join(LIGER_MODEL_TYPES)}, and this is {model.model_type}"
        yield error(config, key, rule, off)
    elif kernels == "liger" and find_spec("liger_kernel") is None:
        fix = f"pip install liger-kernel, or set {off}"
        yield error(config, key, "liger-kernel is not installed", off, fix=fix)
    # Seen with torch 2.13.
    elif kernels == "compiled" and model is not None and model.experts is not None:
        rule = f"the products of {model.model_type}'s experts do not compile"
        yield error(config, key, rule, off)
