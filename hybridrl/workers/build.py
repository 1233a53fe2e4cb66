"""The choice of concrete engines: the only module that names them, and it imports them on request.

Every function takes the run's configuration and the Hugging Face folder of the initial model.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch

from hybridrl.agents.rollout import AgentRollout
from hybridrl.algorithms.load import load_part, require_part
from hybridrl.config import parts
from hybridrl.config.actor import ActorConfig
from hybridrl.config.critic import CriticConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.data.conversations import pad_token_of
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import RolloutEngine, WeightSender
from hybridrl.workers.rollout.sglang.arguments import (
    ServerPlace,
    device_name,
    server_spec,
    show_devices,
)
from hybridrl.workers.train.backend import Backend
from hybridrl.workers.train.critic_engine import CriticEngine
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine
from hybridrl.workers.train.reward_engine import RewardEngine

_ADAPTER = "hybridrl.models.adapter"
"""Imported by name on request: peft takes 2 s, which a run without adapters saves."""

_MEGATRON = "hybridrl.workers.train.megatron.backend"
"""Likewise; it need not be installed."""

_SGLANG = "hybridrl.workers.rollout.sglang.engine"
"""Likewise; it need not be installed."""

_SGLANG_WEIGHTS = "hybridrl.workers.rollout.sglang.weights"
"""Likewise."""


def build_train_engine(
    config: ExperimentConfig, model_folder: Path, device: torch.device
) -> PolicyEngine:
    """Start the policy's training engine on this rank; a collective call.

    With ``mode=eval`` it has no optimizer: it holds the weights that engines sample with.
    """
    backend = _build_backend(
        config,
        model_folder,
        device,
        section=config.actor,
        num_total_steps=None if config.mode == "eval" else config.num_policy_updates,
        lora=config.lora,
    )
    return PolicyEngine(backend)


def build_reference_engine(
    config: ExperimentConfig, model_folder: Path, device: torch.device, *, actor: PolicyEngine
) -> PolicyEngine | BaseModelReference | None:
    """Start the frozen reference, if a KL penalty or ``dpo.loss`` needs one; a collective call.

    With LoRA it is the actor without its adapter: no second copy.
    """
    if not config.needs_reference:
        return None
    if config.lora.enabled:
        return BaseModelReference(actor)
    return PolicyEngine(_build_backend(config, model_folder, device, section=config.actor))


def build_teacher_engine(config: ExperimentConfig, device: torch.device) -> PolicyEngine | None:
    """Start the frozen teacher, if there is one; a collective call."""
    folder = config.algorithm.teacher_path
    if folder is None:
        return None
    return PolicyEngine(_build_backend(config, Path(folder), device, section=config.actor))


def build_reward_engines(config: ExperimentConfig, device: torch.device) -> dict[str, RewardEngine]:
    """Start the frozen reward models by the name of their reward; a collective call."""
    return {
        name: RewardEngine(
            _build_backend(config, Path(folder), device, section=config.actor, is_reward_model=True)
        )
        for name, folder in config.reward.model_paths.items()
    }


def build_reward_trainer(
    config: ExperimentConfig, model_folder: Path, device: torch.device
) -> RewardEngine:
    """Start the engine of a reward model that learns; a collective call."""
    tokenizer = load_tokenizer(model_folder, needs_chat_template=False)
    backend = _build_backend(
        config,
        model_folder,
        device,
        section=config.actor,
        num_total_steps=config.num_policy_updates,
        is_reward_model=True,
    )
    return RewardEngine(
        backend,
        center_coefficient=config.reward_model.center_coefficient,
        pad_token_id=pad_token_of(model_folder, tokenizer),
    )


def build_critic_engine(
    config: ExperimentConfig, model_folder: Path, device: torch.device
) -> CriticEngine:
    """Start the critic's engine on this rank; a collective call."""
    backend = _build_backend(
        config,
        model_folder,
        device,
        section=config.critic,
        num_total_steps=config.num_critic_updates,
    )
    return CriticEngine(backend, value_clip=config.critic.value_clip)


def build_agent_rollout(config: ExperimentConfig, model_folder: Path) -> AgentRollout | None:
    """Load the agent of this rank; None if responses have a single turn."""
    if config.agent.is_single_turn:
        return None
    tokenizer = load_tokenizer(model_folder, needs_chat_template=True)
    stop_token_ids = load_stop_token_ids(model_folder, tokenizer)
    return AgentRollout(
        config.agent,
        tokenizer,
        stop_token_ids=stop_token_ids,
        hidden_variables=config.serving.key_variables,
    )


def build_rollout_engine(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    *,
    place: ServerPlace | None = None,
) -> RolloutEngine:
    """Start the rollout engine that this rank owns.

    Args:
        model_folder: whose configuration and tokenizer the engine reads.
        place: of a server; None if it has the device of this rank alone.
    """
    if config.rollout.engine == "hf":
        return HFRolloutEngine(
            model_folder,
            config=config.rollout,
            device=device,
            max_context_tokens=config.max_row_tokens,
            lora=config.lora if config.lora.sends_adapters else None,
        )
    place = place or ServerPlace(gpus=(device_name(device),))
    engine: RolloutEngine = import_module(_SGLANG).SGLangEngine(
        server_spec(config, model_folder, place),
        variables=show_devices(place.gpus),
        device=device,
    )
    return engine


def build_follower(rollout: RolloutConfig, device: torch.device) -> WeightSender | None:
    """Make the weight sender of a rank without an engine.

    None if the engine needs no bytes of that rank.
    """
    if rollout.engine == "hf":
        return None
    transport: WeightSender = import_module(_SGLANG_WEIGHTS).build_transport(
        rollout, device=device, is_sender=False, from_disk=rollout.transport == "disk"
    )
    return transport


def build_policy_loss(config: ExperimentConfig) -> PolicyGradientLoss:
    """Import the parts of the policy loss.

    Raises:
        ConfigError: a part's file is not on this machine, or cannot be imported.
    """
    algorithm = config.algorithm
    is_corrected_before = algorithm.old_logprobs == "recompute"
    correction = load_part(algorithm, parts.ROLLOUT_CORRECTION)
    return PolicyGradientLoss(
        policy_loss=require_part(algorithm, parts.POLICY_LOSS),
        kl_estimator=require_part(algorithm, parts.KL),
        kl_gradient=algorithm.kl.gradient,
        entropy_coefficient=algorithm.entropy_coefficient,
        token_mask=load_part(algorithm, parts.TOKEN_MASK),
        correction=None if is_corrected_before else correction,
        is_old_the_sampler=algorithm.old_logprobs == "sampler",
    )


def _build_backend(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    *,
    section: ActorConfig | CriticConfig,
    num_total_steps: int | None = None,
    lora: LoraConfig | None = None,
    is_reward_model: bool = False,
) -> Backend:
    """Choose the training back end by ``section.engine``; without steps it does not learn."""
    adapter = None
    if lora is not None and lora.enabled:
        adapter = import_module(_ADAPTER).Adapter(lora, seed=config.seed)
    if section.engine == "fsdp2":
        return FSDP2Backend(
            model_folder,
            config=section,
            model_config=config.model,
            device=device,
            num_total_steps=num_total_steps,
            adapter=adapter,
            is_reward_model=is_reward_model,
        )
    context = MegatronContext(
        megatron=config.megatron,
        model=config.model,
        device=device,
        seed=config.seed,
        timeout_s=config.cluster.collective_timeout_s,
    )
    backend: Backend = import_module(_MEGATRON).MegatronBackend(
        model_folder,
        config=section,
        context=context,
        num_total_steps=num_total_steps,
        adapter=adapter,
        is_reward_model=is_reward_model,
    )
    return backend
