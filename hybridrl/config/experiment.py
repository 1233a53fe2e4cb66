"""The full configuration of one run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hybridrl.config.actor import ActorConfig, CriticConfig
from hybridrl.config.agent import AgentConfig
from hybridrl.config.algorithm import (
    INITIAL,
    AlgorithmConfig,
    DpoConfig,
    RewardModelConfig,
    SftConfig,
)
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.eval import EvalConfig
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.model import LoraConfig, ModelConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.serving import ASKED_BY_OTHERS, PlacedGroup, ServingConfig
from hybridrl.config.topology import Absent, Attached, Colocated, Fused, LedDevices, Own, Topology
from hybridrl.config.trainer import CheckpointConfig, TrackingConfig, TrainerConfig

OFFLINE_MODES: tuple[Literal["sft", "dpo", "reward_model"], ...] = ("sft", "dpo", "reward_model")
"""Modes that learn from the rows of a data set and sample nothing. Each has a section of its own
name."""

PAIR_MODES: tuple[str, ...] = ("dpo", "reward_model")
"""Those of them whose rows are preference pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """Mirrors hydra_configs/config.yaml: one field per section."""

    mode: Literal["train", "check", "plan", "sft", "dpo", "reward_model", "eval", "doctor"]
    """``train`` runs reinforcement learning, ``sft`` supervised fine-tuning, ``dpo`` direct
    preference optimisation, ``reward_model`` trains a model that gives rewards. ``check`` validates
    ``train``, ``plan`` predicts its memory, ``doctor`` examines its rows; they start nothing.
    ``eval`` evaluates a model and trains nothing."""

    seed: Annotated[int, Field(ge=0, le=2**31 - 1)]
    """Seed of all randomness: model init, data order, sampling."""

    model: ModelConfig
    """Initial weights and tokenizer."""

    actor: ActorConfig
    """How the policy is trained."""

    critic: CriticConfig
    """How the critic is trained. It is built only for an advantage that reads its values."""

    megatron: MegatronConfig
    """How megatron-core splits models."""

    lora: LoraConfig
    """Adapters instead of all weights."""

    rollout: RolloutConfig
    """How responses are sampled."""

    serving: ServingConfig
    """Rollout engines on devices of their own."""

    agent: AgentConfig
    """How a response comes about."""

    algorithm: AlgorithmConfig
    """The objective."""

    data: DataConfig
    """Source of prompts."""

    reward: RewardConfig
    """How responses are scored."""

    cluster: ClusterConfig
    """Machines and processes."""

    trainer: TrainerConfig
    """The driver's loop."""

    checkpoint: CheckpointConfig
    """Checkpoints, from which a run resumes."""

    eval: EvalConfig
    """Evaluation on held-out prompts."""

    sft: SftConfig
    """Supervised fine-tuning."""

    dpo: DpoConfig
    """Direct preference optimisation."""

    reward_model: RewardModelConfig
    """Training of a reward model."""

    tracking: TrackingConfig
    """Where metrics are written."""

    @property
    def num_rows_per_step(self) -> int:
        """Responses B = P x G that one step samples."""
        return self.trainer.num_prompts_per_step * self.rollout.num_responses_per_prompt

    @property
    def offline(self) -> SftConfig | DpoConfig | RewardModelConfig | None:
        """The section of a mode that learns from the rows of a data set; None in other modes."""
        if self.mode == "sft":
            return self.sft
        if self.mode == "dpo":
            return self.dpo
        return self.reward_model if self.mode == "reward_model" else None

    @property
    def needs_reference(self) -> bool:
        """Whether ranks hold the model as it was loaded: for a KL penalty, a loss of pairs, or as
        a teacher."""
        if self.offline is not None:
            return self.mode == "dpo" and self.dpo.needs_reference
        is_teacher = INITIAL in self.algorithm.teacher_names
        return self.mode != "eval" and (is_teacher or self.algorithm.kl.placement != "none")

    @property
    def topology(self) -> Topology:
        """Where the rollout engines stand; decided here alone. Groups may still break rules."""
        serving = self.serving
        if not self.samples:
            return Absent()
        if not serving.models:
            return Fused(self.cluster.num_ranks, self.rollout.tensor_parallel_size)
        if not serving.colocated:
            return Attached() if serving.has_external_policy else Own()
        has_others = serving.has_external_policy or any(
            group.model == serving.policy and group.config.num_engines
            for group in serving.placed_groups
            if not self.is_on_trainer(group)
        )
        return Colocated(tuple(self._led_engines()), has_others)

    def is_on_trainer(self, group: PlacedGroup) -> bool:
        """Whether the devices of a group are the trainer's, too: it sleeps while that computes."""
        device = group.first_device % max(1, self.serving.num_devices_per_node)
        return device < self.num_shared_per_node

    def _led_engines(self) -> Iterator[LedDevices]:
        per_node = max(1, self.serving.num_devices_per_node)
        for group in filter(self.is_on_trainer, self.serving.placed_groups):
            if group.model in self.idle_models:
                continue
            path, size = self.serving.models[group.model].path, group.config.devices_per_engine
            for number in range(group.config.num_engines):
                node, device = divmod(group.first_device + number * size, per_node)
                first = node * self.cluster.num_ranks_per_node + device
                yield LedDevices(range(first, first + size), group, Path(path) if path else None)

    @property
    def idle_models(self) -> Collection[str]:
        """Served models that nobody asks in this mode, so no engine of them starts."""
        return self.algorithm.served_teachers if self.mode == "eval" else ()

    @property
    def has_servers(self) -> bool:
        """Whether a rollout manager has the requests: of engines beside the ranks, or of theirs."""
        return self.samples and bool(self.serving.models)

    @property
    def samples_ahead(self) -> bool:
        """Whether servers sample for later steps while the trainer learns."""
        is_beside = isinstance(self.topology, Own | Attached)
        return is_beside and self.mode != "eval" and self.trainer.max_staleness > 0

    @property
    def num_adapters(self) -> int:
        """Adapters that an engine has at the same time: of the versions that may be open, and one.

        No response that is open when new weights come is older than ``trainer.max_staleness``. The
        router does not know which server has which, and a comparison stops the engines anyway.
        """
        is_apart = self.lora.sends_adapters and self.serving.on_update == "finish"
        is_stopped = self.serving.router != "none" or self.rollout.verify_weights == "always"
        is_one = is_stopped or not (is_apart and self.samples_ahead)
        return 1 if is_one else self.trainer.max_staleness + 1

    @property
    def oversamples(self) -> bool:
        """Whether a phase begins more prompts than a step needs, and completes some of them."""
        return self.samples and self.mode != "eval" and self.rollout.oversample > 1

    @property
    def num_open_prompts(self) -> int:
        """Prompts that a phase begins or continues, with ``rollout.oversample``."""
        wanted = self.rollout.oversample * self.trainer.num_prompts_per_step
        return math.ceil(round(wanted, 6))  # 1.1 * 10 is above 11

    @property
    def samples(self) -> bool:
        """Whether there are rollout engines: no offline mode has any, and no replay."""
        return self.offline is None and self.rollout.replay is None

    @property
    def returns_experts(self) -> bool:
        """Whether rollout engines return the experts of each token, for training to replay."""
        return self.actor.replay_routing and self.offline is None and self.mode != "eval"

    @property
    def asks_servers(self) -> bool:
        """Whether the manager asks the policy's servers by HTTP: complete ones that the run starts.

        Answers with experts are too large for one process to read.
        """
        groups = self.serving.placed_groups
        is_whole = not any(group.config.worker_type in ASKED_BY_OTHERS for group in groups)
        is_own = is_whole and not self.serving.has_external_policy
        return is_own and self.rollout.engine == "sglang" and not self.returns_experts

    @property
    def num_shared_per_node(self) -> int:
        """Devices of the servers on each node that are the trainer's, too: the first ones."""
        return self.cluster.num_ranks_per_node if self.serving.colocated else 0

    @property
    def num_own_server_devices(self) -> int:
        """Devices of all servers that are not the trainer's; 0 without servers."""
        per_node = max(0, self.serving.num_devices_per_node - self.num_shared_per_node)
        return self.cluster.num_nodes * per_node if self.has_servers else 0

    @property
    def num_devices(self) -> int:
        """Devices of all ranks and servers, each once."""
        num_critics = self.num_critic_ranks if self.has_critic_pool else 0
        return self.cluster.num_ranks + num_critics + self.num_own_server_devices

    @property
    def num_steps(self) -> int:
        """Steps of the run in this mode."""
        return 1 if self.mode == "eval" else self.trainer.num_steps

    @property
    def evaluates(self) -> bool:
        """Whether responses to held-out prompts are sampled."""
        return self.mode == "eval" or (self.offline is None and self.eval.every_num_steps > 0)

    @property
    def files_by_key(self) -> dict[str, tuple[str, ...]]:
        """Data files of the run, by the key that lists them."""
        own = {"data.train_files": self.data.train_files, "data.eval_files": self.data.eval_files}
        sources = {f"data.sources.{name}.files": s.files for name, s in self.data.sources.items()}
        sets = {f"eval.sets.{name}.files": one.files or () for name, one in self.eval.sets.items()}
        return own | sources | sets

    @property
    def exports_model(self) -> bool:
        """Whether a finished run leaves its model as a Hugging Face folder."""
        return self.offline is not None or self.trainer.export_hf

    @property
    def max_digits(self) -> int:
        """Digits of the longest number of a built-in task.

        Each takes a token, one more is for ``=`` in the prompt, and for the end of the answer.
        """
        limit = min(self.data.max_prompt_tokens, self.rollout.max_response_tokens)
        return max(1, min(2 if self.data.task == "read_numbers" else 20, limit - 1))

    @property
    def max_row_tokens(self) -> int:
        """Longest prompt plus longest response that training learns from, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def response_limits(self) -> dict[str, int]:
        """Length limits of the responses that engines sample, in tokens, by their keys."""
        sets = self.eval.all_sets() if self.evaluates else []
        own = {
            f"{one.key}.max_response_tokens": one.max_response_tokens
            for one in sets
            if one.max_response_tokens is not None
        }
        is_usual = self.mode != "eval" or len(own) < len(sets)
        usual = {"rollout.max_response_tokens": self.rollout.max_response_tokens}
        return {**(usual if is_usual else {}), **own}

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus longest response of rollout engines, in tokens, of evaluations too.

        That of training is ``max_row_tokens``.
        """
        return self.data.max_prompt_tokens + max(self.response_limits.values())

    @property
    def num_train_groups(self) -> int:
        """Data-parallel ranks of the policy's training: those with different rows."""
        return self._num_groups(self.cluster.num_ranks)

    @property
    def has_critic(self) -> bool:
        """Whether the run trains a critic: its mode samples and learns, with one."""
        samples_and_learns = self.offline is None and self.mode != "eval"
        return samples_and_learns and self.algorithm.reads("values_BL")

    @property
    def has_critic_pool(self) -> bool:
        """Whether a critic has processes of its own, beside the cluster's ranks."""
        return self.has_critic and self.critic.num_ranks_per_node > 0

    @property
    def critic_engine(self) -> ActorConfig:
        """The critic's engine: the actor's, whose optimizer has the critic's learning rate."""
        optimizer = replace(self.actor.optimizer, lr=self.critic.optimizer.lr)
        return replace(self.actor, optimizer=optimizer)

    @property
    def num_critic_ranks(self) -> int:
        """Ranks that train the critic, over all machines."""
        if not self.has_critic_pool:
            return self.cluster.num_ranks
        return self.cluster.num_nodes * self.critic.num_ranks_per_node

    @property
    def num_critic_groups(self) -> int:
        """Data-parallel ranks of the critic's training."""
        return self._num_groups(self.num_critic_ranks)

    @property
    def megatron_worlds(self) -> dict[str, int]:
        """Ranks of each worker group that megatron-core splits, by the key of its ranks per node.

        Empty if no model of this run trains on megatron-core.
        """
        if self.actor.engine != "megatron":
            return {}
        worlds = {"cluster.num_ranks_per_node": self.cluster.num_ranks}
        if self.has_critic_pool:
            worlds["critic.num_ranks_per_node"] = self.num_critic_ranks
        return worlds

    @property
    def num_ranks_per_group(self) -> int:
        """Ranks that have the same rows: they share a model's layers, or the rows' tokens."""
        if self.actor.engine == "megatron":
            return self.megatron.model_parallel_size
        return self.actor.fsdp2.context_parallel_size

    def _num_groups(self, num_ranks: int) -> int:
        return max(1, num_ranks // self.num_ranks_per_group)

    @property
    def num_policy_updates(self) -> int:
        """Optimizer steps of the policy over the run."""
        if self.offline is not None:
            return self.trainer.num_steps
        num_warmup_steps = self.critic.num_warmup_steps if self.has_critic else 0
        return (self.trainer.num_steps - num_warmup_steps) * self.algorithm.num_updates_per_step

    @property
    def num_critic_updates(self) -> int:
        """Optimizer steps of the critic over the run; 0 without a critic."""
        return self.trainer.num_steps * self.critic.num_updates_per_step


def with_value(config: ExperimentConfig, key: str, value: object) -> ExperimentConfig:
    """Return ``config`` with another value of a dotted key; nothing is checked."""
    section, _, name = key.rpartition(".")
    changed: Any = replace(attrgetter(section)(config), **{name: value})
    if "." in section:
        return with_value(config, section, changed)
    return replace(config, **{section: changed})
