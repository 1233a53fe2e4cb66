"""Where concrete engines are chosen: the only place that names them, and only if asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridrl.config.actor import ActorConfig
from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.critic import CriticConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import ModelConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.planning.frozen_base import BasePlan
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import RolloutEngine, WeightSender
from hybridrl.workers.rollout.sglang.arguments import ServerSpec, device_name, show_devices
from hybridrl.workers.train.backend import Backend
from hybridrl.workers.train.critic_engine import CriticEngine
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine
from hybridrl.workers.train.protocol import TokenLoss

if TYPE_CHECKING:
    from hybridrl.models.adapter import Adapter

_ADAPTER = "hybridrl.models.adapter"
"""Imported by name if asked for: peft takes 2 s, which a run without adapters need not wait for."""

_MEGATRON = "hybridrl.workers.train.megatron.backend"
"""Likewise; it need not be installed."""

_SGLANG = "hybridrl.workers.rollout.sglang.engine"
"""Likewise; it need not be installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """What a worker needs to train a model."""

    model_folder: Path
    """Hugging Face folder to start from."""

    model: ModelConfig
    actor: ActorConfig
    megatron: MegatronConfig
    lora: LoraConfig

    seed: int
    """Of the run: all that a rank draws derives from it."""

    device: str
    """cpu or cuda."""

    num_total_updates: int
    """Optimizer steps of the whole run; the learning-rate schedule ends there."""

    max_response_tokens: int
    """Fixed length of ``loss_aggregation=sequence_mean_fixed_length``."""

    collective_timeout_s: float
    """Seconds one collective may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorRolloutSpec(TrainSpec):
    """What a fused worker needs on top."""

    rollout: RolloutConfig
    algorithm: AlgorithmConfig

    max_context_tokens: int
    """Longest prompt plus longest response of training and evaluation: sizes the KV cache."""

    num_ranks_per_node: int
    base_plan: BasePlan | None
    """What ``lora.base=auto`` is decided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSpec:
    """What a worker needs to train a critic."""

    model_folder: Path
    """Hugging Face folder to start from: the policy's."""

    model: ModelConfig
    critic: CriticConfig
    megatron: MegatronConfig

    seed: int
    """Of the run."""

    device: str
    """cpu or cuda."""

    num_total_updates: int
    """Optimizer steps of the whole run; the learning-rate schedule ends there."""

    collective_timeout_s: float
    """Seconds one collective may take."""


def build_train_engine(spec: TrainSpec, device: torch.device) -> PolicyEngine:
    """Start the policy's training engine on this rank; a collective call."""
    return PolicyEngine(
        _build_backend(
            spec, device, spec.actor, num_total_steps=spec.num_total_updates, lora=spec.lora
        )
    )


def build_reference_engine(
    spec: ActorRolloutSpec, device: torch.device, *, actor: PolicyEngine
) -> PolicyEngine | BaseModelReference | None:
    """Start the frozen reference, if a KL penalty asks for one; a collective call.

    With LoRA it is the actor without its adapter: no second copy.
    """
    if spec.algorithm.kl.placement == "none":
        return None
    if spec.lora.enabled:
        return BaseModelReference(actor)
    return PolicyEngine(_build_backend(spec, device, spec.actor))


def build_critic_engine(spec: CriticSpec, device: torch.device) -> CriticEngine:
    """Start the critic's engine on this rank; a collective call."""
    backend = _build_backend(spec, device, spec.critic, num_total_steps=spec.num_total_updates)
    return CriticEngine(backend, value_clip=spec.critic.value_clip)


def build_rollout_engine(
    spec: ActorRolloutSpec, device: torch.device, *, gpus: Sequence[str] = ()
) -> RolloutEngine:
    """Start the rollout engine that this rank leads.

    Args:
        spec: what the worker runs.
        device: of this rank.
        gpus: of all ranks that share the engine, by ``device_name``; left out where it is this
            rank's alone.
    """
    return _ROLLOUT_ENGINES[spec.rollout.engine](spec, device, gpus or [device_name(device)])


def build_weight_port(
    spec: ActorRolloutSpec, device: torch.device, *, engine: RolloutEngine | None
) -> WeightSender | None:
    """Make this rank's end of the weight stream; None where engines lie in their ranks' processes.

    Args:
        spec: what the worker runs.
        device: of this rank.
        engine: what ``build_rollout_engine`` built here; None on a rank that leads no engine.
    """
    if spec.rollout.engine == "hf":
        return None
    port: WeightSender = import_module(_SGLANG).weight_sender(
        engine, rollout=spec.rollout, device=device
    )
    return port


def build_policy_loss(spec: ActorRolloutSpec) -> TokenLoss:
    """Choose the terms of the policy loss."""
    algorithm = spec.algorithm
    return PolicyGradientLoss(
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_estimator=algorithm.kl.estimator,
        kl_coefficient=algorithm.kl.coefficient if algorithm.kl.placement == "loss" else 0.0,
        entropy_coefficient=algorithm.entropy_coefficient,
        sampler_ratio_cap=algorithm.sampler_ratio_cap,
    )


def _build_backend(
    spec: TrainSpec | CriticSpec,
    device: torch.device,
    config: ActorConfig | CriticConfig,
    *,
    num_total_steps: int | None = None,
    lora: LoraConfig | None = None,
) -> Backend:
    """Choose the training back end by ``config.engine``; without steps it does not learn."""
    adapter = _make_adapter(lora, seed=spec.seed)
    if config.engine == "fsdp2":
        return FSDP2Backend(
            spec.model_folder,
            config=config,
            model_config=spec.model,
            device=device,
            num_total_steps=num_total_steps,
            adapter=adapter,
        )
    context = MegatronContext(
        megatron=spec.megatron,
        model=spec.model,
        device=device,
        seed=spec.seed,
        timeout_s=spec.collective_timeout_s,
    )
    backend: Backend = import_module(_MEGATRON).MegatronBackend(
        spec.model_folder,
        config=config,
        context=context,
        num_total_steps=num_total_steps,
        adapter=adapter,
    )
    return backend


def _make_adapter(lora: LoraConfig | None, *, seed: int) -> Adapter | None:
    if lora is None or not lora.enabled:
        return None
    adapter: Adapter = import_module(_ADAPTER).Adapter(lora, seed=seed)
    return adapter


def _build_hf(spec: ActorRolloutSpec, device: torch.device, _gpus: Sequence[str]) -> RolloutEngine:
    return HFRolloutEngine(
        spec.model_folder,
        config=spec.rollout,
        device=device,
        max_context_tokens=spec.max_context_tokens,
        lora=spec.lora if spec.lora.sends_adapters else None,
    )


def _build_sglang(
    spec: ActorRolloutSpec, device: torch.device, gpus: Sequence[str]
) -> RolloutEngine:
    engine: RolloutEngine = import_module(_SGLANG).SGLangEngine(
        server_spec(spec), variables=show_devices(gpus), device=device
    )
    return engine


def server_spec(spec: ActorRolloutSpec) -> ServerSpec:
    """Say what an SGLang server of this worker serves; a rehearsal says the same beforehand."""
    return ServerSpec(
        model_folder=spec.model_folder,
        rollout=spec.rollout,
        lora=spec.lora if spec.lora.sends_adapters else None,
        max_context_tokens=spec.max_context_tokens,
        seed=spec.seed,
        device=spec.device,
    )


_BuildRollout = Callable[[ActorRolloutSpec, torch.device, Sequence[str]], RolloutEngine]
_ROLLOUT_ENGINES: dict[str, _BuildRollout] = {
    "hf": _build_hf,
    "sglang": _build_sglang,
}
