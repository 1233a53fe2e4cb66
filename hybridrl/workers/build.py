"""Where concrete engines are chosen: the only place that names them, and only if asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

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
from hybridrl.workers.train.critic import FSDP2Critic
from hybridrl.workers.train.frozen_policy import AdaptedPolicy, BaseModelReference
from hybridrl.workers.train.fsdp2 import FSDP2Engine
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.mcore.setting import MegatronContext
from hybridrl.workers.train.protocol import CriticEngine, ScoringEngine, TokenLoss, TrainEngine
from hybridrl.workers.train.scorer import FSDP2Scorer

_LORA = "hybridrl.workers.train.lora"
"""Imported by name if asked for: peft takes 2 s, which a run without adapters need not wait for."""

_MEGATRON = "hybridrl.workers.train.mcore"
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


def build_train_engine(spec: TrainSpec, device: torch.device) -> TrainEngine:
    """Start the policy's training engine on this rank; a collective call."""
    return _TRAIN_ENGINES[spec.actor.engine](spec, device)


def build_reference_engine(
    spec: ActorRolloutSpec, device: torch.device, *, actor: TrainEngine
) -> ScoringEngine | None:
    """Start the frozen reference, if a KL penalty asks for one; a collective call.

    With LoRA it is the actor without its adapter: no second copy.
    """
    if spec.algorithm.kl.placement == "none":
        return None
    if spec.lora.enabled:
        return BaseModelReference(cast(AdaptedPolicy, actor))
    return _SCORING_ENGINES[spec.actor.engine](spec, device)


def build_critic_engine(spec: CriticSpec, device: torch.device) -> CriticEngine:
    """Start the critic's engine on this rank; a collective call."""
    return _CRITIC_ENGINES[spec.critic.engine](spec, device)


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


def _build_fsdp2(spec: TrainSpec, device: torch.device) -> TrainEngine:
    if spec.lora.enabled:
        engine: TrainEngine = import_module(_LORA).FSDP2LoraEngine(
            spec.model_folder,
            config=spec.actor,
            model_config=spec.model,
            lora=spec.lora,
            seed=spec.seed,
            num_total_steps=spec.num_total_updates,
            device=device,
        )
        return engine
    return FSDP2Engine(
        spec.model_folder,
        config=spec.actor,
        model_config=spec.model,
        num_total_steps=spec.num_total_updates,
        device=device,
    )


def _build_fsdp2_scorer(spec: TrainSpec, device: torch.device) -> ScoringEngine:
    return FSDP2Scorer(spec.model_folder, config=spec.actor, model_config=spec.model, device=device)


def _build_fsdp2_critic(spec: CriticSpec, device: torch.device) -> CriticEngine:
    return FSDP2Critic(
        spec.model_folder,
        config=spec.critic,
        model_config=spec.model,
        num_total_steps=spec.num_total_updates,
        device=device,
    )


def _build_megatron(spec: TrainSpec, device: torch.device) -> TrainEngine:
    if spec.lora.enabled:
        adapted: TrainEngine = import_module(f"{_MEGATRON}.lora").MegatronLoraEngine(
            spec.model_folder,
            config=spec.actor,
            setting=_setting(spec, device),
            lora=spec.lora,
            seed=spec.seed,
            num_total_steps=spec.num_total_updates,
        )
        return adapted
    engine: TrainEngine = import_module(f"{_MEGATRON}.engine").MegatronEngine(
        spec.model_folder,
        config=spec.actor,
        setting=_setting(spec, device),
        num_total_steps=spec.num_total_updates,
    )
    return engine


def _build_megatron_scorer(spec: TrainSpec, device: torch.device) -> ScoringEngine:
    engine: ScoringEngine = import_module(f"{_MEGATRON}.engine").MegatronScorer(
        spec.model_folder, config=spec.actor, setting=_setting(spec, device)
    )
    return engine


def _build_megatron_critic(spec: CriticSpec, device: torch.device) -> CriticEngine:
    engine: CriticEngine = import_module(f"{_MEGATRON}.critic").MegatronCritic(
        spec.model_folder,
        config=spec.critic,
        setting=_setting(spec, device),
        num_total_steps=spec.num_total_updates,
    )
    return engine


def _setting(spec: TrainSpec | CriticSpec, device: torch.device) -> MegatronContext:
    return MegatronContext(
        megatron=spec.megatron,
        model=spec.model,
        device=device,
        seed=spec.seed,
        timeout_s=spec.collective_timeout_s,
    )


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


_TRAIN_ENGINES: dict[str, Callable[[TrainSpec, torch.device], TrainEngine]] = {
    "fsdp2": _build_fsdp2,
    "megatron": _build_megatron,
}
_SCORING_ENGINES: dict[str, Callable[[TrainSpec, torch.device], ScoringEngine]] = {
    "fsdp2": _build_fsdp2_scorer,
    "megatron": _build_megatron_scorer,
}
_CRITIC_ENGINES: dict[str, Callable[[CriticSpec, torch.device], CriticEngine]] = {
    "fsdp2": _build_fsdp2_critic,
    "megatron": _build_megatron_critic,
}
_BuildRollout = Callable[[ActorRolloutSpec, torch.device, Sequence[str]], RolloutEngine]
_ROLLOUT_ENGINES: dict[str, _BuildRollout] = {
    "hf": _build_hf,
    "sglang": _build_sglang,
}
