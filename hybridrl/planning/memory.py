"""The formula: from a configuration and a workload to the memory plan of the fullest rank.

Pure: reads config.json, allocates nothing. What lies in memory in which phase follows the life of
a step (``docs/architecture.md``); each number stands in ``training.py`` or ``sampling.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from hybridrl.config.actor import EngineConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.plan import MemoryPlan, Part, Phase, Place
from hybridrl.planning.roles import AdapterShape, Numerics, critic_role, policy_roles
from hybridrl.planning.sampling import RolloutMemory
from hybridrl.planning.shapes import ModelShape, shape_of
from hybridrl.planning.training import TrainingMemory
from hybridrl.planning.workload import Microbatch, Workload

_MIB = 2**20
_CPU_BUCKET = 256 * _MIB  # workers/sharding/weight_stream.py
_CUDA_BUCKET_SHARE = 0.1  # of free memory, as there; free is taken as half of 80 GiB
_FLOAT32 = 4
_EXPORT_FILE = 4 * 2**30  # workers/train/export.py

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_LIBRARIES = {
    "build": 10,
    "make_room": 10,
    "sync": 12,
    "generate": 20,
    "logprobs": 40,
    "values": 40,
    "critic_update": 60,
    "update": 60,
}
"""MiB of code and workspace of torch that a CPU process touches for the first time, by phase."""

_FRAGMENTS_ALONE, _FRAGMENTS_AFTER_ANOTHER, _FRAGMENTS_RECOMPUTED = 0.10, 0.55, 1.10
"""Memory that malloc cannot use again, by activations, measured on a CPU with glibc 2.36: for the
only micro-batch of an update; for one after others, whose gradients lie scattered over the memory
that they freed; and for blocks that are recomputed
while gradients appear. Without malloc's heap
(MALLOC_MMAP_THRESHOLD_=131072) there is none of it, and the update is slower."""

_CUDA_RESERVE = 2048 * _MIB
"""CUDA context, NCCL's buffers and what the allocator cannot use. An allowance, not measured."""


def plan_memory(config: ExperimentConfig, *, workload: Workload | None = None) -> MemoryPlan:
    """Compute what a rank of ``mode=train`` holds in each phase, once the first step is done.

    Args:
        config: has passed its checks.
        workload: lengths of rows; None takes the longest that the configuration allows.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
    """
    return MemoryPlan(config.cluster.device, tuple(_PolicyRank.of(config, workload).phases()))


def plan_critic_pool(config: ExperimentConfig) -> MemoryPlan | None:
    """Compute what a rank of the critic's own pool holds; None where it has none.

    Raises:
        ModelError: as ``plan_memory``.
    """
    if not config.has_critic_pool:
        return None
    return MemoryPlan(config.cluster.device, tuple(_CriticRank.of(config, None).phases()))


@dataclass(frozen=True)  # without slots: sizes are computed once
class _Rank:
    """What a rank of either worker group has."""

    config: ExperimentConfig
    shape: ModelShape
    workload: Workload
    max_context_tokens: int

    @classmethod
    def of(cls, config: ExperimentConfig, workload: Workload | None) -> Self:
        longest = Workload.longest(config)
        return cls(config, shape_of(config.model), workload or longest, longest.num_row_tokens)

    @property
    def _models(self) -> tuple[TrainingMemory, ...]:
        """The models whose training state this rank has a share of."""
        return (self._critic,)

    def _at_rest(self) -> list[Part]:
        """What the rollout engine keeps while training has the device."""
        return []

    # -- what lies there while something else happens --------------------------------------------

    def _weights(self) -> list[Part]:
        return [Part(f"{model.role.name} weights", model.weights) for model in self._models]

    def _moments(self, place: Place = Place.DEVICE) -> list[Part]:
        name = "optimizer" if place is Place.DEVICE else "offloaded optimizer"
        return [Part(name, sum(model.optimizer for model in self._models), place)]

    def _standing(self) -> list[Part]:
        """Training state and what the rollout engine leaves there."""
        return [*self._weights(), *self._moments(), *self._at_rest()]

    # -- phases ----------------------------------------------------------------------------------

    def _load(self) -> list[Part]:
        """Weights are there, and the files that they were read from still mapped."""
        files = self.shape.num_parameters * self._numerics.storage_bytes
        return [*self._weights(), Part("weight files, mapped", files, Place.HOST)]

    def _values(self) -> list[Part]:
        """The critic's forward pass: no chunk of logits."""
        pack, critic = self._scored(self._critic_workload, self._critic), self._critic
        stream = pack.num_tokens * self.shape.hidden_size * critic.numerics.compute_bytes
        computing = Part("activations", critic.passing(pack) + stream)
        return [*self._standing(), Part("gathered weights", critic.gathered), computing]

    def _critic_update(self) -> list[Part]:
        critic, config = self._critic, self.config.critic
        pack = self._trained(self._critic_workload, critic)
        is_alone = pack.is_only_one and config.num_updates_per_step == 1
        return max(self._update(critic, pack, self._fragments(config, is_alone)), key=_total)

    def _update(
        self, model: TrainingMemory, pack: Microbatch, share_of_fragments: float
    ) -> Iterator[list[Part]]:
        """Instants of the last backward pass: its loss, its last block and its first block."""
        saved = model.activations(pack)
        standing = [
            *self._standing(),
            Part("gathered weights", model.gathered),
            Part("malloc fragments", int(share_of_fragments * saved)),
        ]
        before, held = model.gradients_before_last(pack), model.embedding_gradient()
        yield [
            *standing,
            Part("gradients", before),
            Part("activations", saved),
            Part("logits", model.logits_backward(pack)),
        ]
        passing = model.passing(pack)
        yield [*standing, Part("gradients", before + held), Part("activations", saved + passing)]
        last = Part("activations", model.saved_by_block(pack) + passing)
        yield [*standing, Part("gradients", model.gradients_at_end(pack) + held), last]

    def _fragments(self, engine: EngineConfig, is_alone: bool) -> float:  # noqa: FBT001
        if self.config.cluster.device == "cuda":
            return 0.0
        if engine.gradient_checkpointing:
            return _FRAGMENTS_RECOMPUTED
        return _FRAGMENTS_ALONE if is_alone else _FRAGMENTS_AFTER_ANOTHER

    def _export(self) -> list[Part]:
        """The end of a run: the last checkpoint's copy, then on rank 0 a file of whole weights."""
        saves = self.config.checkpoint.every_num_steps > 0
        snapshot = saves * sum(model.snapshot for model in self._models)
        return [*self._standing(), Part("checkpoint", snapshot, Place.HOST)]

    def _phase(self, name: str, parts: list[Part]) -> Phase:
        if self.config.cluster.device == "cuda":
            rest = [Part("CUDA, NCCL, fragments", _CUDA_RESERVE, is_measured=False)]
        else:
            rest = [Part("libraries", _LIBRARIES.get(name, 20) * _MIB)]
        rest.append(Part("Python, torch, Ray", _PROCESS, Place.HOST, is_measured=False))
        return Phase(name, tuple(part for part in (*parts, *rest) if part.num_bytes))

    # -- sizes -----------------------------------------------------------------------------------

    @cached_property
    def _numerics(self) -> Numerics:
        return Numerics.of(self.config)

    @cached_property
    def _critic(self) -> TrainingMemory:
        return TrainingMemory(critic_role(self.shape), Numerics.of_critic(self.config))

    @cached_property
    def _critic_workload(self) -> Workload:
        return Workload.of_critic(self.config, self.workload)

    def _trained(self, workload: Workload, model: TrainingMemory) -> Microbatch:
        return workload.microbatch(shares_prompts=not model.numerics.has_varlen_attention)

    def _scored(self, workload: Workload, model: TrainingMemory) -> Microbatch:
        return self._trained(workload.scoring(), model)


class _CriticRank(_Rank):
    """A rank of the critic's own pool."""

    def phases(self) -> Iterator[Phase]:
        yield self._phase("build", self._load())
        yield self._phase("values", self._values())
        yield self._phase("critic_update", self._critic_update())
        yield self._phase("export", self._export())


class _PolicyRank(_Rank):
    """A rank of the policy, its rollout engine, its reference, and a critic that is fused."""

    def phases(self) -> Iterator[Phase]:
        yield self._phase("build", max([*self._engine()], self._build(), key=_total))
        if self._sleeps:
            yield self._phase("make_room", self._make_room())
        yield self._phase("sync", max(self._sync(), key=_total))
        yield self._phase("generate", self._generate())
        if self._has_critic:
            yield self._phase("values", self._values())
        if self._scores_rollouts:
            yield self._phase("logprobs", self._logprobs())
        if self._has_critic:
            yield self._phase("critic_update", self._critic_update())
        yield self._phase("update", self._policy_update())
        yield self._phase("export", self._export())

    def _engine(self) -> tuple[Part, Part]:
        weights, kv_cache = self._rollout.weights, self._rollout.kv_cache
        return Part("rollout weights", weights), Part("KV cache", kv_cache)

    def _at_rest(self) -> list[Part]:
        if not self._sleeps:
            return [*self._engine()]
        lora, weights = self.config.lora, self._rollout.weights
        if lora.sends_adapters and lora.base == "resident":
            return [Part("rollout weights", weights)]
        if self.config.rollout.backup_weights == "ledger":
            keeps_base = lora.sends_adapters and lora.base == "backup"
            weights = keeps_base * self._rollout.base_weights
        return [Part("backup of rollout weights", weights, Place.HOST)]

    def _build(self) -> list[Part]:
        """Training engines load; a rollout engine that sleeps has nothing to keep yet."""
        return [*([] if self._sleeps else self._engine()), *self._load()]

    def _make_room(self) -> list[Part]:
        """Moments lie on the device until their copies on the host are whole."""
        return [*self._standing(), *self._moments(Place.HOST)]

    def _sync(self) -> Iterator[list[Part]]:
        """Both copies of the weights are there, and a bucket in between.

        Of an adapter the base is sent before the first step, when there are no moments yet.
        """
        moments = self._moments(Place.HOST if self._sleeps else Place.DEVICE)
        engine = (
            [Part("rollout weights", self._rollout.weights)] if self._sleeps else self._engine()
        )
        there = [*self._weights(), *engine]
        stream = Part("weight stream", self._bucket())
        if not self.config.lora.sends_adapters:
            yield [*there, *moments, stream]
            return
        yield [*there, stream]
        arrived = Part("weight stream", self._actor.role.num_adapter_parameters * _FLOAT32)
        again = self._sleeps and self.config.lora.base == "resend"
        yield [*there, *moments, stream if again else arrived]

    def _bucket(self) -> int:
        """A bucket, the tensor that no longer fitted into it, and the buffer of its gather.

        Plain weights are sent as they are; with an adapter merged into them they are new ones.
        """
        lora = self.config.lora
        if not self._numerics.is_sharded and not (lora.enabled and lora.sync == "merged"):
            return 0
        whole = self.shape.num_parameters * self._numerics.storage_bytes
        largest = self.shape.num_embedding_parameters * self._numerics.storage_bytes
        configured = self.config.rollout.bucket_mib * _MIB
        if not configured and self.config.cluster.device == "cuda":
            configured = int(_CUDA_BUCKET_SHARE * 40 * 2**30)
        gathered = largest if self._numerics.is_sharded else 0
        return min(whole, (configured or _CPU_BUCKET) + largest) + gathered

    def _generate(self) -> list[Part]:
        sampling = Part("sampling", self._rollout.sampling)
        if not self._sleeps:
            return [*self._standing(), sampling]
        away = sum(model.weights + model.optimizer for model in self._models)
        return [Part("offloaded training state", away, Place.HOST), *self._engine(), sampling]

    def _logprobs(self) -> list[Part]:
        """A forward pass without gradients: a block computes, or a chunk of logits exists."""
        actor = self._actor
        pack = self._scored(self.workload, actor)
        stream = pack.num_tokens * self.shape.hidden_size * self._numerics.compute_bytes
        instants = (
            Part("activations", actor.passing(pack) + stream),
            Part("logits", actor.logits_forward(pack) + 2 * stream),
        )
        gathered = Part("gathered weights", actor.gathered)
        return [*self._standing(), gathered, max(instants, key=lambda part: part.num_bytes)]

    def _policy_update(self) -> list[Part]:
        pack = self._trained(self.workload, self._actor)
        is_alone = pack.is_only_one and self.config.algorithm.num_updates_per_step == 1
        fragments = self._fragments(self.config.actor, is_alone)
        return max(self._update(self._actor, pack, fragments), key=_total)

    def _export(self) -> list[Part]:
        whole = self.shape.num_parameters * self._numerics.storage_bytes
        is_copied = self._numerics.is_sharded or self.config.cluster.device == "cuda"
        is_copied |= self.config.lora.enabled  # merged
        file = Part("file of weights", is_copied * min(whole, _EXPORT_FILE), Place.HOST)
        return [*super()._export(), file]

    # -- sizes -----------------------------------------------------------------------------------

    @cached_property
    def _models(self) -> tuple[TrainingMemory, ...]:
        roles = policy_roles(self.config, self.shape)
        policy = tuple(TrainingMemory(role, self._numerics) for role in roles)
        return (*policy, self._critic) if self._has_critic else policy

    @property
    def _actor(self) -> TrainingMemory:
        return self._models[0]

    @cached_property
    def _rollout(self) -> RolloutMemory:
        lora = self.config.lora
        return RolloutMemory(
            self.shape,
            self.config.rollout,
            self.workload,
            self.max_context_tokens,
            AdapterShape.of(lora, self.shape) if lora.sends_adapters else None,
        )

    @property
    def _sleeps(self) -> bool:
        return self.config.rollout.sleep

    @property
    def _has_critic(self) -> bool:
        return self.config.has_critic and not self.config.has_critic_pool

    @property
    def _scores_rollouts(self) -> bool:
        algorithm = self.config.algorithm
        return algorithm.kl.placement != "none" or algorithm.old_logprobs == "recompute"


def _total(parts: list[Part]) -> int:
    return sum(part.num_bytes for part in parts)
