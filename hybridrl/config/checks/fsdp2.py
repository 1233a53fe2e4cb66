"""Rules about ``actor.fsdp2`` and ``critic.fsdp2``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec

from hybridrl.config.actor import EngineConfig
from hybridrl.config.architecture import find_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.fsdp2 import FSDP2Config
from hybridrl.config.model import LIGER_MODEL_TYPES
from hybridrl.errors import ConfigError

UNUSED = FSDP2Config(
    reduce_gradients="every_microbatch",
    num_replicas=1,
    cpu_offload=False,
    reshard_after_forward=True,
    num_prefetched_blocks=0,
    compile_blocks=False,
    liger_kernels=False,
)
"""The defaults of hydra_configs."""


def check_fsdp2_is_used(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The keys are changed only where a model trains on FSDP2."""
    for section, engine, _ in _engines(config):
        if engine.engine == "fsdp2":
            continue
        values = asdict(engine.fsdp2)
        for name, usual in asdict(UNUSED).items():
            if values[name] != usual:
                reset = f"{section}.fsdp2.{name}={str(usual).lower()}"
                yield ConfigError(
                    f"{section}.fsdp2.{name}",
                    values[name],
                    f"would be ignored, because {section}.engine={engine.engine}",
                    remedies=[(reset,)],
                    fix=f"set {reset}, or {section}=fsdp2",
                )


def check_replicas(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Every copy of the model has the same number of ranks."""
    for section, engine, num_ranks in _engines(config):
        number = engine.fsdp2.num_replicas
        if engine.engine == "fsdp2" and num_ranks % number:
            key = f"{section}.fsdp2.num_replicas"
            yield ConfigError(
                key,
                number,
                f"must divide the number of ranks that train the model, {num_ranks}",
                remedies=[(f"{key}={math.gcd(number, num_ranks)}",)],
            )


def check_liger_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Liger's kernels need CUDA and an extra package, and replace a compiler's fusion."""
    model = find_architecture(config.model)
    for section, engine, _ in _engines(config):
        options, key = engine.fsdp2, f"{section}.fsdp2.liger_kernels"
        if not options.liger_kernels:
            continue
        reset = f"{key}=false"
        if config.cluster.device != "cuda":
            rule = f"runs on CUDA alone, and cluster.device={config.cluster.device}"
            yield ConfigError(key, got=True, rule=rule, remedies=[(reset,)])
        elif model is not None and model.model_type not in LIGER_MODEL_TYPES:
            rule = f"is shown for {', '.join(LIGER_MODEL_TYPES)}, and this is {model.model_type}"
            yield ConfigError(key, got=True, rule=rule, remedies=[(reset,)])
        elif find_spec("liger_kernel") is None:
            yield ConfigError(
                key,
                got=True,
                rule="liger-kernel is not installed",
                remedies=[(reset,)],
                fix=f"pip install liger-kernel, or set {reset}",
            )
        if options.compile_blocks:
            yield ConfigError(
                key,
                got=True,
                rule=f"{section}.fsdp2.compile_blocks=true fuses the same operations",
                remedies=[(reset,)],
            )


def check_compiled_blocks(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Torch's compiler fails on the grouped products of experts (seen with torch 2.13)."""
    model = find_architecture(config.model)
    for section, engine, _ in _engines(config):
        key = f"{section}.fsdp2.compile_blocks"
        if engine.fsdp2.compile_blocks and model is not None and model.experts is not None:
            rule = f"the products of {model.model_type}'s experts do not compile"
            yield ConfigError(key, got=True, rule=rule, remedies=[(f"{key}=false",)])


def _engines(config: ExperimentConfig) -> Iterator[tuple[str, EngineConfig, int]]:
    """Yield section, engine and ranks of each model that learns."""
    yield "actor", config.actor, config.cluster.num_ranks
    if config.has_critic and config.mode != "sft":
        yield "critic", config.critic, config.num_critic_ranks


RULES = (check_fsdp2_is_used, check_replicas, check_liger_kernels, check_compiled_blocks)
