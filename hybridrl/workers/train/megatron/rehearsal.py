"""Building what a run would give to megatron-core, without ranks, weights or a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridrl.config.actor import EngineConfig
from hybridrl.config.architecture import Architecture, architecture_of
from hybridrl.config.checks.megatron import INSTALL_TRANSFORMER_ENGINE
from hybridrl.config.checks.megatron_args import (
    keys_of_transformer_engine,
    without_transformer_engine,
)
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, ConfigErrors
from hybridrl.workers.train.megatron.architecture import megatron_architecture
from hybridrl.workers.train.megatron.megatron_core import HAVE_TE, VERSION
from hybridrl.workers.train.megatron.training import ddp_config, optimizer_config
from hybridrl.workers.train.megatron.transformer import (
    Duty,
    adapting_duty,
    choose_kernels,
    lacking_kernels,
    transformer_config,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Role:
    name: str
    engine: EngineConfig
    duty: Duty


def rehearse(config: ExperimentConfig) -> list[str]:
    """Build megatron-core's configuration objects as the run's engines would.

    Args:
        config: of a run that trains on megatron-core; of the model config.json alone is read.

    Returns:
        What megatron-core said on the way, line by line.

    Raises:
        ConfigErrors: what it refuses, of all models of the run.
        ModelError: it cannot compute the model.
    """
    path = config.model.path
    architecture = megatron_architecture(Path(path)) if path else architecture_of(config.model)
    device = torch.device(config.cluster.device)
    unchecked = {} if HAVE_TE else keys_of_transformer_engine(config.megatron)
    if unchecked:
        config = replace(config, megatron=without_transformer_engine(config.megatron))
    refused: dict[str, ConfigError] = {}
    roles = list(_roles(config, architecture))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for role in roles:
            try:
                _build(role, architecture, config, device)
            except ConfigError as error:
                refused[str(error)] = error
    if refused:
        raise ConfigErrors([*refused.values()])
    lines = [
        f"megatron-core {VERSION} takes the configuration of: "
        + ", ".join(role.name for role in roles)
    ]
    if unchecked:
        lines.append(
            f"not checked: {', '.join(unchecked)}, for TransformerEngine is not installed here; "
            f"{INSTALL_TRANSFORMER_ENGINE}"
        )
    elif missing := lacking_kernels(config.megatron, device):
        lines.append(missing)
    said = dict.fromkeys(" ".join(str(warning.message).split()) for warning in heard)
    return [*lines, *(f"megatron-core warns: {line}" for line in said)]


def _roles(config: ExperimentConfig, architecture: Architecture) -> Iterator[_Role]:
    """Yield the models of a run that megatron-core has."""
    if config.actor.engine == "megatron":
        lora = config.lora
        duty = adapting_duty(architecture, lora) if lora.enabled else "learns"
        yield _Role(name="policy", engine=config.actor, duty=duty)
        if config.algorithm.kl.placement != "none" and not config.lora.enabled:
            yield _Role(name="reference", engine=config.actor, duty="scores")
    if config.has_critic and config.critic.engine == "megatron":
        yield _Role(name="critic", engine=config.critic, duty="learns")


def _build(
    role: _Role, architecture: Architecture, config: ExperimentConfig, device: torch.device
) -> None:
    kernels = choose_kernels(
        architecture,
        megatron=config.megatron,
        model=config.model,
        engine=role.engine,
        device=device,
        duty=role.duty,
    )
    transformer_config(
        architecture,
        megatron=config.megatron,
        engine=role.engine,
        device=device,
        kernels=kernels,
    )
    if role.duty != "scores":
        ddp_config(role.engine, config.megatron, device, duty=role.duty)
        optimizer_config(role.engine, config.megatron)
