"""Build megatron-core's configuration of a run, without ranks, weights or a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridrl.config.actor import ActorConfig
from hybridrl.config.checks.megatron import (
    INSTALL_TRANSFORMER_ENGINE,
    keys_of_transformer_engine,
    without_transformer_engine,
)
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError, ConfigErrors
from hybridrl.models.architecture import Architecture, architecture_of
from hybridrl.workers.train.megatron.architecture import megatron_architecture
from hybridrl.workers.train.megatron.configuration import (
    adapting_duty,
    ddp_config,
    lacking_kernels,
    optimizer_config,
    transformer_config,
)
from hybridrl.workers.train.megatron.context import Duty, MegatronContext
from hybridrl.workers.train.megatron.megatron_core import HAVE_TE, VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class _Role:
    name: str
    architecture: Architecture
    engine: ActorConfig
    duty: Duty
    path: str = ""  # of a teacher


def rehearse(config: ExperimentConfig) -> list[str]:
    """Build megatron-core's configuration objects as the run's engines would.

    Of a model config.json alone is read. Returns lines for the user, with warnings; ConfigErrors
    has all that is rejected, a ModelError is of a model that it cannot compute.
    """
    device = torch.device(config.cluster.device)
    is_complete = HAVE_TE or torch.cuda.is_available()  # without a GPU it runs on another machine
    unchecked = {} if is_complete else keys_of_transformer_engine(config.megatron)
    if unchecked:
        config = replace(config, megatron=without_transformer_engine(config.megatron))
    rejected: dict[str, ConfigError] = {}
    roles = list(_roles(config))
    context = MegatronContext(
        megatron=config.megatron,
        model=config.model,
        device=device,
        seed=config.seed,
        timeout_s=config.cluster.collective_timeout_s,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for role in roles:
            try:
                _build(role, context)
            except ConfigError as error:
                if role.name == "teacher" and str(error) not in rejected:
                    error = ConfigError(  # the configuration suits the policy
                        "algorithm.teacher_path",
                        role.path,
                        f"the teacher cannot be built as the policy is: {error}",
                        "change the value it names, or set it to another folder of the policy's "
                        "family",
                    )
                rejected[str(error)] = error
    if rejected:
        raise ConfigErrors([*rejected.values()])
    lines = [
        f"megatron-core {VERSION} takes the configuration of: "
        + ", ".join(role.name for role in roles)
    ]
    if unchecked:
        lines.append(
            f"not checked: {', '.join(unchecked)}, since TransformerEngine cannot be imported "
            f"here; {INSTALL_TRANSFORMER_ENGINE}"
        )
    elif missing := lacking_kernels(config.megatron, device):
        lines.append(missing)
    warned = dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught)
    return [*lines, *(f"megatron-core warns: {line}" for line in warned)]


def _roles(config: ExperimentConfig) -> Iterator[_Role]:
    """Yield the models of a run that compute on megatron-core."""
    path = config.model.path
    model = megatron_architecture(Path(path)) if path else architecture_of(config.model)
    if config.actor.engine == "megatron":
        actor, lora = config.actor, config.lora
        duty = adapting_duty(model, lora) if lora.enabled else "learns"
        yield _Role(name="policy", architecture=model, engine=actor, duty=duty)
        if config.needs_reference and not lora.enabled:
            yield _Role(name="reference", architecture=model, engine=actor, duty="scores")
        for path in config.algorithm.teacher_folders:
            taught_by = megatron_architecture(Path(path))
            yield _Role(
                name="teacher", architecture=taught_by, engine=actor, duty="scores", path=path
            )
        if config.has_critic:
            critic = config.critic_engine
            yield _Role(name="critic", architecture=model, engine=critic, duty="learns")


def _build(role: _Role, context: MegatronContext) -> None:
    transformer_config(role.architecture, context, role.engine, duty=role.duty)
    if role.duty != "scores":
        ddp_config(context.megatron, context.device, duty=role.duty)
        optimizer_config(role.engine, context.megatron)
