"""Rules about ``actor.fsdp2`` and ``critic.fsdp2``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

from hybridrl.config.actor import EngineConfig, FSDP2Config
from hybridrl.config.checks.messages import error, unused_keys
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import LIGER_MODEL_TYPES
from hybridrl.errors import ConfigError
from hybridrl.models.architecture import find_architecture

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


def check_fsdp2(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Keys are changed only where a model trains on FSDP2, whose copies have equal ranks."""
    for section, engine, num_ranks in _engines(config):
        key, number = f"{section}.fsdp2.num_replicas", engine.fsdp2.num_replicas
        if engine.engine != "fsdp2":
            why = f", because {section}.engine={engine.engine}"
            fsdp2 = f"{section}.fsdp2"
            yield from unused_keys(config, fsdp2, UNUSED, why, f"{section}=fsdp2")
        elif num_ranks % number:
            rule = f"must divide the number of ranks that train the model, {num_ranks}"
            yield error(config, key, rule, f"{key}={math.gcd(number, num_ranks)}")


def check_kernels(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Liger's kernels need CUDA and an extra package; a compiler does not know those of experts."""
    model = find_architecture(config.model)
    for section, engine, _ in _engines(config):
        key, compiled = f"{section}.fsdp2.liger_kernels", f"{section}.fsdp2.compile_blocks"
        off = f"{key}=false"
        if engine.fsdp2.liger_kernels and config.cluster.device != "cuda":
            rule = f"runs on CUDA alone, and cluster.device={config.cluster.device}"
            yield error(config, key, rule, off)
        elif engine.fsdp2.liger_kernels and model and model.model_type not in LIGER_MODEL_TYPES:
            rule = f"is shown for {', '.join(LIGER_MODEL_TYPES)}, and this is {model.model_type}"
            yield error(config, key, rule, off)
        elif engine.fsdp2.liger_kernels and find_spec("liger_kernel") is None:
            fix = f"pip install liger-kernel, or set {off}"
            yield error(config, key, "liger-kernel is not installed", off, fix=fix)
        if engine.fsdp2.liger_kernels and engine.fsdp2.compile_blocks:
            yield error(config, key, f"{compiled}=true fuses the same operations", off)
        # Seen with torch 2.13.
        if engine.fsdp2.compile_blocks and model is not None and model.experts is not None:
            rule = f"the products of {model.model_type}'s experts do not compile"
            yield error(config, compiled, rule, f"{compiled}=false")


def _engines(config: ExperimentConfig) -> Iterator[tuple[str, EngineConfig, int]]:
    """Yield section, engine and ranks of each model that learns."""
    yield "actor", config.actor, config.cluster.num_ranks
    if config.has_critic:
        yield "critic", config.critic, config.num_critic_ranks


RULES = (check_fsdp2, check_kernels)
