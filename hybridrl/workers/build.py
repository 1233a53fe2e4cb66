"""The choice of concrete engines: the only module that names them. It imports them on request."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import ray
import torch

from hybridrl.agents.rollout import AgentRollout
from hybridrl.algorithms.load import load_part, require_part
from hybridrl.config.actor import ModelKind
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.config.model import LoraConfig
from hybridrl.config.serving import HALVES
from hybridrl.config.topology import LedDevices
from hybridrl.data.conversations import pad_token_of
from hybridrl.data.tokenizer import load_stop_token_ids, load_tokenizer
from hybridrl.models.image_settings import read_image_settings
from hybridrl.models.model_folder import read_settings
from hybridrl.network import LOOPBACK, Door
from hybridrl.workers.engine_settings import led_config
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import RolloutEngine, WeightSender
from hybridrl.workers.rollout.request_listener import RequestListener
from hybridrl.workers.rollout.sglang.arguments import (
    KeyedAddress,
    LaunchPlace,
    device_name,
    server_spec,
    show_devices,
)
from hybridrl.workers.rollout.sglang.process import free_port
from hybridrl.workers.sampling import ManagerSampling, RankSampling, Sampling
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.fused_engines import FusedEngines, start_engine
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.publishing import Publisher
from hybridrl.workers.train.backend import Backend
from hybridrl.workers.train.context_parallel import start_context_parallel
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine
from hybridrl.workers.train.teachers import Teacher, Teachers
from hybridrl.workers.train.value_engines import CriticEngine, RewardEngine

# Imported by name on request: peft takes 2 s, the others need not be installed.
_ADAPTER = "hybridrl.models.adapter"
_MEGATRON = "hybridrl.workers.train.megatron.backend"
_SGLANG = "hybridrl.workers.rollout.sglang.engine"
_SGLANG_TRANSPORTS = "hybridrl.workers.rollout.sglang.transports"


def build_train_engine(
    config: ExperimentConfig, model_folder: Path, device: torch.device
) -> PolicyEngine:
    """Start the policy's training engine, without an optimizer if ``mode=eval``; collective."""
    num_steps = None if config.mode == "eval" else config.num_policy_updates
    return PolicyEngine(
        _build_backend(config, model_folder, device, num_total_steps=num_steps, lora=config.lora)
    )


def build_reference_engine(
    config: ExperimentConfig, model_folder: Path, device: torch.device, *, actor: PolicyEngine
) -> PolicyEngine | BaseModelReference | None:
    """Start the frozen reference, if there is one; with LoRA it is the actor without adapter."""
    if not config.needs_reference:
        return None
    if config.lora.enabled:
        return BaseModelReference(actor)
    return PolicyEngine(_build_backend(config, model_folder, device))


def build_teachers(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    own: Mapping[str, Teacher | None],
) -> Teachers | None:
    """Start the frozen teachers, if there are any; ``own`` are the policy, and as it began."""
    algorithm, top_k = config.algorithm, config.algorithm.divergence_top_k
    if not algorithm.teacher_names or algorithm.served_teachers or config.mode == "eval":
        return None
    vocab_size = int(read_settings(model_folder)["vocab_size"])
    return Teachers(
        models=[
            own.get(folder) or PolicyEngine(_build_backend(config, Path(folder), device))
            for folder in algorithm.teacher_names
        ],
        temperature=config.rollout.temperature,
        vocab_size=vocab_size,
        num_likeliest=vocab_size if top_k is None else min(top_k, vocab_size),
    )


def build_reward_engines(config: ExperimentConfig, device: torch.device) -> dict[str, RewardEngine]:
    """Start the frozen reward models by the name of their reward."""
    return {
        name: RewardEngine(_build_backend(config, Path(folder), device, kind="reward_model"))
        for name, folder in config.reward.model_paths.items()
    }


def build_reward_trainer(
    config: ExperimentConfig, model_folder: Path, device: torch.device
) -> RewardEngine:
    """Start the engine of a reward model that learns."""
    tokenizer = load_tokenizer(model_folder, needs_chat_template=False)
    num_steps = config.num_policy_updates
    return RewardEngine(
        _build_backend(
            config, model_folder, device, num_total_steps=num_steps, kind="reward_model"
        ),
        center_coefficient=config.reward_model.center_coefficient,
        pad_token_id=pad_token_of(model_folder, tokenizer),
    )


def build_critic_engine(
    config: ExperimentConfig, model_folder: Path, device: torch.device
) -> CriticEngine:
    """Start the critic's engine."""
    num_steps = config.num_critic_updates
    backend = _build_backend(config, model_folder, device, num_total_steps=num_steps, kind="critic")
    return CriticEngine(backend, value_clip=config.critic.value_clip)


def build_agent_rollout(config: ExperimentConfig, model_folder: Path) -> AgentRollout | None:
    """Load the agent of this rank; None if responses have a single turn."""
    if config.agent.is_single_turn:
        return None
    tokenizer = load_tokenizer(model_folder, needs_chat_template=True)
    return AgentRollout(
        config.agent,
        tokenizer,
        stop_token_ids=load_stop_token_ids(model_folder, tokenizer),
        max_prompt_tokens=config.data.max_prompt_tokens,
        hidden_variables=config.serving.key_variables,
        images=read_image_settings(model_folder, max_pixels=config.data.max_image_pixels),
    )


def build_rollout_engine(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    *,
    place: LaunchPlace | None = None,
) -> RolloutEngine:
    """Start the rollout engine that this rank owns, without weights; a server at ``place``."""
    if config.rollout.engine == "hf":
        return HFRolloutEngine(
            model_folder,
            config=config.rollout,
            device=device,
            max_context_tokens=config.max_context_tokens,
            lora=config.lora if config.lora.sends_adapters else None,
        )
    place = place or LaunchPlace(gpus=(device_name(device),))
    spec, variables = server_spec(config, model_folder, place), show_devices(place.gpus)
    sglang, is_frozen = import_module(_SGLANG), config.model.freeze_vision
    engine: RolloutEngine = (
        sglang.EncoderEngine(spec, variables=variables, is_frozen=is_frozen)
        if spec.is_encoder
        else sglang.SGLangEngine(spec, variables=variables, device=device)
    )
    return engine


def build_engines(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    *,
    servers: ManagerClient | None,
    control: ControlGroup,
) -> FusedEngines:
    """Start the rollout engines that ranks lead. A collective call."""
    engines = config.topology.engines
    engine = _start_led(config, model_folder, device, engines=engines, control=control)
    others: Publisher | None = None
    if servers is not None and config.topology.has_others:
        others = Publisher(servers, config=config.rollout, device=device, control=control)
    # Of a rank that shares the policy's engine of another.
    follower: WeightSender | None = None
    follows = any(control.rank in each.ranks[1:] and each.folder is None for each in engines)
    if follows and config.rollout.engine != "hf":
        from_disk = config.rollout.transport == "disk"
        follower = import_module(_SGLANG_TRANSPORTS).build_transport(
            config.rollout, device=device, is_sender=False, from_disk=from_disk
        )
    return FusedEngines(
        None if engine is None else ManagedEngine(engine, config=config.rollout, device=device),
        engines=engines,
        config=config.rollout,
        device=device,
        control=control,
        others=others,
        follower=follower,
    )


def _start_led(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    *,
    engines: tuple[LedDevices, ...],
    control: ControlGroup,
) -> RolloutEngine | None:
    """Start the rollout engine that this rank owns, if any. A collective call, as others start."""
    own = next((engine for engine in engines if control.rank in engine.ranks), None)
    led = own if own is not None and own.leader == control.rank else None
    gpus = control.gather("devices", device_name(device))
    address = None if led is None else _address_of(config, led)
    addresses = control.gather("addresses", address)
    build = None
    if led is not None:
        place = LaunchPlace(
            gpus=tuple(gpus[rank] for rank in led.ranks),
            address=address,
            prefills=tuple(_prefills(led, engines, addresses)),
        )
        port = None if address is None else address.bootstrap_port
        build = partial(
            build_rollout_engine,
            led_config(config, led, bootstrap_port=port),
            led.folder or model_folder,
            device,
            place=place,
        )
    ranks = None if own is None else own.ranks
    return start_engine(build, ranks=ranks, config=config.rollout, control=control)


def _address_of(config: ExperimentConfig, engine: LedDevices) -> KeyedAddress | None:
    """Choose where a half of a request is reached by the others; None for other engines."""
    if engine.group is None or engine.group.config.worker_type not in HALVES:
        return None
    port = bootstrap_port = free_port()
    while bootstrap_port == port:
        bootstrap_port = free_port()
    is_alone = config.cluster.num_nodes == 1
    return KeyedAddress(
        host=LOOPBACK if is_alone else ray.util.get_node_ip_address(),
        port=port,
        key=secrets.token_urlsafe(),
        bootstrap_port=bootstrap_port if engine.group.config.worker_type == "prefill" else None,
    )


def _prefills(
    engine: LedDevices, engines: Sequence[LedDevices], addresses: Sequence[KeyedAddress | None]
) -> Iterator[KeyedAddress]:
    """Yield the addresses of the halves whose keys and values a decode engine continues."""
    if engine.group is None or engine.group.config.worker_type != "decode":
        return
    for other in engines:
        address = addresses[other.leader]
        if other.model == engine.model and address is not None and address.bootstrap_port:
            yield address


def build_sampling(
    config: ExperimentConfig,
    model_folder: Path,
    *,
    engine: RolloutEngine | None,
    servers: ManagerClient | None,
    sharding: ShardingManager,
    control: ControlGroup,
) -> Sampling:
    """Choose who samples for the ranks; ``engine`` is that of this rank."""
    if servers is None:
        if engine is None:
            return Sampling()
        agent = build_agent_rollout(config, model_folder)
        return RankSampling(engine, agent=agent, meter=sharding.meter)
    engines = config.topology.engines
    own = next((each for each in engines if each.leader == control.rank), None)
    listener = None
    if engine is not None and own is not None and own.answers:
        listener = RequestListener(engine, door=Door(host=servers.host, key=servers.key))
    return ManagerSampling(
        servers,
        engines=engines,
        listener=listener,
        engine=engine,
        control=control,
        sharding=sharding,
    )


def build_policy_loss(config: ExperimentConfig) -> PolicyGradientLoss:
    """Import the parts of the policy loss; ConfigError if a part's file cannot be imported."""
    algorithm = config.algorithm
    is_corrected_before = algorithm.old_logprobs == "recompute"
    correction = load_part(algorithm, parts.ROLLOUT_CORRECTION)
    return PolicyGradientLoss(
        policy_loss=require_part(algorithm, parts.POLICY_LOSS),
        kl_estimator=require_part(algorithm, parts.KL),
        kl_gradient=algorithm.kl.gradient,
        entropy_coefficient=algorithm.entropy_coefficient,
        divergence_coefficient=algorithm.divergence_coefficient,
        token_mask=load_part(algorithm, parts.TOKEN_MASK),
        correction=None if is_corrected_before else correction,
        is_old_the_sampler=algorithm.old_logprobs == "sampler",
    )


def _build_backend(
    config: ExperimentConfig,
    model_folder: Path,
    device: torch.device,
    *,
    num_total_steps: int | None = None,
    lora: LoraConfig | None = None,
    kind: ModelKind = "policy",
) -> Backend:
    """Choose the back end by ``actor.engine``; without steps it does not learn."""
    chosen = config.critic_engine if kind == "critic" else config.actor
    adapter = None
    if lora is not None and lora.enabled:
        adapts_tower = not config.model.freeze_vision
        adapter = import_module(_ADAPTER).Adapter(lora, seed=config.seed, adapts_tower=adapts_tower)
    if chosen.engine == "fsdp2":
        return FSDP2Backend(
            model_folder,
            config=chosen,
            model_config=config.model,
            device=device,
            num_total_steps=num_total_steps,
            adapter=adapter,
            kind=kind,
            context=start_context_parallel(
                chosen.fsdp2.context_parallel_size,
                device,
                timeout_s=config.cluster.collective_timeout_s,
            ),
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
        config=chosen,
        context=context,
        num_total_steps=num_total_steps,
        adapter=adapter,
        kind=kind,
    )
    return backend
