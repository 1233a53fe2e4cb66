"""What the ranks of both worker groups have in common: training state, and the critic's phases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from hybridrl.config.actor import EngineConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.megatron import MegatronMemory
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, Phase
from hybridrl.planning.roles import ModelPrecision, PlannedModel, critic_role
from hybridrl.planning.shapes import ModelShape, shape_of
from hybridrl.planning.training import TrainingMemory
from hybridrl.planning.workload import Microbatch, Workload

_MIB = 2**20

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_LIBRARIES = {
    "build": 10,
    "offload_optimizer": 10,
    "sync": 30,
    "generate": 35,
    "logprobs": 40,
    "values": 40,
    "critic_update": 60,
    "update": 60,
}
"""MiB of code and workspace of torch that a CPU process touches for the first time, by phase; what
oneDNN generates in one phase (18 MiB measured) stays for the others."""

_FRAGMENTS_ALONE, _FRAGMENTS_AFTER_ANOTHER, _FRAGMENTS_RECOMPUTED = 0.10, 0.55, 1.10
"""Memory that malloc cannot use again, by activations, measured on a CPU with glibc 2.36: for the
only micro-batch of an update; for one after others, whose gradients lie scattered over the memory
that they freed; and for blocks that are recomputed while gradients appear. Without malloc's heap
(MALLOC_MMAP_THRESHOLD_=131072) there is none of it, and the update is slower."""

_FRAGMENTS_OF_ADAPTER_ALONE, _FRAGMENTS_OF_ADAPTER = 0.55, 1.20
"""The same beside an adapter; fitted to one run each. Why it is more was not found out: perhaps
because each adapted layer frees large tensors around the small one between A and B."""

_CUDA_RESERVE = 2048 * _MIB
"""CUDA context, NCCL's buffers and what the allocator cannot use. An allowance, not measured."""


@dataclass(frozen=True)  # without slots: sizes are computed once
class Rank:
    """What a rank of either worker group has."""

    config: ExperimentConfig
    shape: ModelShape
    workload: Workload
    max_context_tokens: int
    stage: int
    """Of the pipeline, from 0; 0 where nothing is cut into stages."""

    @classmethod
    def of(cls, config: ExperimentConfig, workload: Workload | None) -> tuple[Self, ...]:
        """Read the shape of the model; without a workload take the longest rows.

        Returns:
            A rank of each pipeline stage.
        """
        longest, shape = Workload.longest(config), shape_of(config.model)
        num_stages = config.megatron.pipeline_parallel_size if config.megatron_worlds else 1
        return tuple(
            cls(config, shape, workload or longest, longest.num_row_tokens, stage)
            for stage in range(num_stages)
        )

    @property
    def _models(self) -> tuple[ModelMemory, ...]:
        """The models whose training state this rank has a share of."""
        return (self._critic,)

    def _at_rest(self) -> list[MemoryItem]:
        """What the rollout engine keeps while training has the device."""
        return []

    @abstractmethod
    def phases(self) -> Iterator[Phase]:
        """Yield the phases in the order of a run."""

    @classmethod
    def fullest(cls, config: ExperimentConfig, workload: Workload | None) -> MemoryPlan:
        """Plan for a rank of each pipeline stage, and return that of the fullest."""
        ranks = cls.of(config, workload)
        plans = [
            MemoryPlan(
                config.cluster.device,
                tuple(rank.phases()),
                stage=rank.stage if len(ranks) > 1 else None,
            )
            for rank in ranks
        ]
        # A server takes the same share of every device: then the next largest phase decides.
        return max(plans, key=lambda plan: sorted(map(plan.peak_bytes, plan.phases), reverse=True))

    # -- what lies there while something else happens --------------------------------------------

    def _weights(self) -> list[MemoryItem]:
        return [
            MemoryItem(f"{model.role.name} weights", model.weights, _home_of(model))
            for model in self._models
        ]

    def _moments(self, place: MemoryKind = MemoryKind.DEVICE) -> list[MemoryItem]:
        """Moments where they lie while computing; or, of those that may leave, in ``place``."""
        on_host = sum(m.optimizer for m in self._models if _home_of(m) is MemoryKind.HOST)
        name = "optimizer" if place is MemoryKind.DEVICE else "offloaded optimizer"
        return [
            MemoryItem(name, self._movable_moments, place),
            MemoryItem("optimizer on the host", on_host, MemoryKind.HOST),
        ]

    @property
    def _movable_moments(self) -> int:
        """Bytes of the moments that lie on the device while computing."""
        return sum(m.optimizer for m in self._models if _home_of(m) is MemoryKind.DEVICE)

    def _standing(self) -> list[MemoryItem]:
        """Training state and what the rollout engine leaves there."""
        return [*self._weights(), *self._moments(), *self._at_rest()]

    # -- phases ----------------------------------------------------------------------------------

    def _load(self) -> list[MemoryItem]:
        """Weights are there, and the files that they were read from still mapped."""
        files = MemoryItem("weight files, mapped", self._models[0].mapped_files, MemoryKind.HOST)
        masters = MemoryItem("optimizer", sum(model.masters for model in self._models))
        buffers = MemoryItem("gradient buffers", max(model.buffers for model in self._models))
        return [*self._weights(), buffers, masters, files]

    def _values(self) -> list[MemoryItem]:
        """The critic's forward pass: no chunk of logits."""
        pack, critic = self._scored(self._critic_workload, self._critic), self._critic
        stream = pack.num_tokens * self.shape.hidden_size * critic.numerics.compute_bytes
        computing = MemoryItem("activations", critic.passing(pack) + stream)
        return [*self._standing(), MemoryItem("gathered weights", critic.gathered), computing]

    def _critic_update(self) -> list[MemoryItem]:
        critic, config = self._critic, self.config.critic
        pack = self._trained(self._critic_workload, critic)
        is_alone = pack.is_only_one and config.num_updates_per_step == 1
        fragments = self._fragments(config, is_alone=is_alone)
        return max(self._update(critic, pack, fragments), key=total_bytes)

    def _update(
        self, model: ModelMemory, pack: Microbatch, share_of_fragments: float
    ) -> Iterator[list[MemoryItem]]:
        """Instants of the last backward pass: its loss, its last block and its first block."""
        saved = model.activations(pack)
        standing = [
            *self._standing(),
            MemoryItem("gradient buffers", model.buffers),
            MemoryItem("gathered weights", model.gathered),
            MemoryItem("malloc fragments", int(share_of_fragments * saved)),
            MemoryItem("gradients on the host", model.gradients_on_host, MemoryKind.HOST),
        ]
        before, held = model.gradients_before_last(pack), model.embedding_gradient()
        yield [
            *standing,
            MemoryItem("gradients", before),
            MemoryItem("activations", saved),
            MemoryItem("logits", model.logits_backward(pack)),
        ]
        passing = model.passing(pack)
        yield [
            *standing,
            MemoryItem("gradients", before + held),
            MemoryItem("activations", saved + passing),
        ]
        last = MemoryItem("activations", model.saved_by_block(pack) + passing)
        yield [*standing, MemoryItem("gradients", model.gradients_at_end(pack) + held), last]

    def _fragments(
        self, engine: EngineConfig, *, is_alone: bool, has_adapter: bool = False
    ) -> float:
        if self.config.cluster.device == "cuda":
            return 0.0
        if engine.gradient_checkpointing:
            return _FRAGMENTS_RECOMPUTED
        if has_adapter:
            return _FRAGMENTS_OF_ADAPTER_ALONE if is_alone else _FRAGMENTS_OF_ADAPTER
        return _FRAGMENTS_ALONE if is_alone else _FRAGMENTS_AFTER_ANOTHER

    def _export(self) -> list[MemoryItem]:
        """The end of a run: the last checkpoint's copy, then on rank 0 a file of whole weights."""
        return [*self._standing(), MemoryItem("checkpoint", self._snapshot, MemoryKind.HOST)]

    @property
    def _snapshot(self) -> int:
        """What a save copies to the host."""
        saves = self.config.checkpoint.every_num_steps > 0
        return saves * sum(model.snapshot for model in self._models)

    def _phase(self, name: str, parts: list[MemoryItem]) -> Phase:
        if self.config.cluster.device == "cuda":
            allowance = [MemoryItem("CUDA, NCCL, fragments", _CUDA_RESERVE, is_measured=False)]
        else:
            allowance = [MemoryItem("libraries", _LIBRARIES.get(name, 20) * _MIB)]
        if name not in ("build", "export"):
            # It is written while the step after the save goes on; how long depends on the disk.
            allowance.append(
                MemoryItem("checkpoint", self._snapshot, MemoryKind.HOST, is_measured=False)
            )
        on_host = sum(model.host_optimizer for model in self._models)
        allowance.append(MemoryItem("optimizer kept on the host", on_host, MemoryKind.HOST))
        allowance.append(
            MemoryItem("Python, torch, Ray", _PROCESS, MemoryKind.HOST, is_measured=False)
        )
        return Phase(name, tuple(part for part in (*parts, *allowance) if part.num_bytes))

    # -- sizes -----------------------------------------------------------------------------------

    @cached_property
    def _numerics(self) -> ModelPrecision:
        return ModelPrecision.of(self.config)

    @cached_property
    def _critic(self) -> ModelMemory:
        numerics = ModelPrecision.of_critic(self.config)
        return self._memory(critic_role(self.shape), numerics, self.config.critic)

    def _memory(
        self, role: PlannedModel, numerics: ModelPrecision, engine: EngineConfig
    ) -> ModelMemory:
        if engine.engine == "megatron":
            return MegatronMemory.of(self.config, role, numerics, stage=self.stage)
        return TrainingMemory(role, numerics)

    @cached_property
    def _critic_workload(self) -> Workload:
        return Workload.of_critic(self.config, self.workload)

    def _trained(self, workload: Workload, model: ModelMemory) -> Microbatch:
        return workload.microbatch(shares_prompts=model.numerics.shares_prompts)

    def _scored(self, workload: Workload, model: ModelMemory) -> Microbatch:
        return self._trained(workload.scoring(), model)


class CriticRank(Rank):
    """A rank of the critic's own pool."""

    def phases(self) -> Iterator[Phase]:
        """Yield the phases in the order of a run."""
        yield self._phase("build", self._load())
        yield self._phase("values", self._values())
        yield self._phase("critic_update", self._critic_update())
        yield self._phase("export", self._export())


def _home_of(model: ModelMemory) -> MemoryKind:
    """Return where the model's state lies while it computes."""
    return MemoryKind.HOST if model.numerics.lies_on_host else MemoryKind.DEVICE


def total_bytes(parts: list[MemoryItem]) -> int:
    """Add up parts, wherever they lie."""
    return sum(part.num_bytes for part in parts)
