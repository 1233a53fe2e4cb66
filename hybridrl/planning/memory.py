"""The formula: from a configuration and a workload to the memory plan of the fullest rank.

Pure: reads config.json, allocates nothing. What lies in memory in which phase follows the life of
a step (``docs/architecture.md``); each number stands in ``training.py`` or ``sampling.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.plan import MemoryPlan, Part, Phase, Place
from hybridrl.planning.sampling import RolloutMemory
from hybridrl.planning.shapes import ModelShape, shape_of
from hybridrl.planning.training import Numerics, Role, TrainingMemory
from hybridrl.planning.workload import Microbatch, Workload

_MIB = 2**20
_CPU_BUCKET = 256 * _MIB  # workers/sharding/weight_stream.py
_CUDA_BUCKET_SHARE = 0.1  # of free memory, as there; free is taken as half of 80 GiB
_EXPORT_FILE = 4 * 2**30  # workers/train/export.py

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_LIBRARIES = {
    "build": 10,
    "make_room": 10,
    "sync": 12,
    "generate": 20,
    "logprobs": 40,
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
    longest = Workload.longest(config)
    planner = _Planner(config, shape_of(config.model), workload or longest, longest.num_row_tokens)
    return MemoryPlan(config.cluster.device, tuple(planner.phases()))


def roles_of(config: ExperimentConfig, shape: ModelShape) -> tuple[Role, ...]:
    """List the models among the training engines; a new role is an entry here."""
    actor = Role(
        name="actor",
        shape=shape,
        num_trainable=shape.num_parameters,
        num_outputs=shape.vocab_size,
    )
    reference = Role(name="reference", shape=shape, num_trainable=0, num_outputs=shape.vocab_size)
    return (actor,) if config.algorithm.kl.placement == "none" else (actor, reference)


@dataclass(frozen=True)  # without slots: sizes are computed once
class _Planner:
    config: ExperimentConfig
    shape: ModelShape
    workload: Workload
    max_context_tokens: int

    def phases(self) -> Iterator[Phase]:
        yield self._phase("build", max(self._build(), key=_total))
        if self.config.rollout.sleep:
            yield self._phase("make_room", [*self._state(), *self._moments(Place.HOST)])
        yield self._phase("sync", self._sync())
        yield self._phase("generate", self._generate())
        if self._scores_rollouts:
            yield self._phase("logprobs", self._logprobs())
        yield self._phase("update", max(self._update(), key=_total))
        yield self._phase("export", self._export())

    # -- what lies there while something else happens --------------------------------------------

    def _weights(self, place: Place = Place.DEVICE) -> list[Part]:
        return [Part(f"{role.role.name} weights", role.weights, place) for role in self._roles]

    def _moments(self, place: Place = Place.DEVICE) -> list[Part]:
        name = "optimizer" if place is Place.DEVICE else "offloaded optimizer"
        return [Part(name, sum(role.optimizer for role in self._roles), place)]

    def _state(self) -> list[Part]:
        return [*self._weights(), *self._moments()]

    def _engine(self) -> list[Part]:
        return [
            Part("rollout weights", self._rollout.weights),
            Part("KV cache", self._rollout.kv_cache),
        ]

    def _engine_at_rest(self) -> list[Part]:
        """What the rollout engine keeps while training has the device."""
        if not self.config.rollout.sleep:
            return self._engine()
        if self.config.rollout.backup_weights == "ledger":
            return []
        return [Part("backup of rollout weights", self._rollout.weights, Place.HOST)]

    # -- phases ----------------------------------------------------------------------------------

    def _build(self) -> Iterator[list[Part]]:
        """The rollout engine starts alone; then the training engines read the weight files."""
        yield self._engine()
        files = self.shape.num_parameters * self._numerics.storage_bytes
        mapped = Part("weight files, mapped", files, Place.HOST)
        yield [*self._engine_at_rest(), *self._weights(), mapped]

    def _sync(self) -> list[Part]:
        """Both copies of the weights are there, and a bucket in between."""
        stream = Part("weight stream", self._bucket() if self._numerics.is_sharded else 0)
        if not self.config.rollout.sleep:
            return [*self._state(), *self._engine(), stream]
        weights = Part("rollout weights", self._rollout.weights)
        return [*self._weights(), *self._moments(Place.HOST), weights, stream]

    def _bucket(self) -> int:
        """A bucket, the tensor that no longer fitted into it, and the buffer of its gather."""
        whole = self.shape.num_parameters * self._numerics.storage_bytes
        largest = self.shape.num_embedding_parameters * self._numerics.storage_bytes
        configured = self.config.rollout.bucket_mib * _MIB
        if not configured and self.config.cluster.device == "cuda":
            configured = int(_CUDA_BUCKET_SHARE * 40 * 2**30)
        return min(whole, (configured or _CPU_BUCKET) + largest) + largest

    def _generate(self) -> list[Part]:
        sampling = Part("sampling", self._rollout.sampling)
        if not self.config.rollout.sleep:
            return [*self._state(), *self._engine(), sampling]
        away = sum(role.weights + role.optimizer for role in self._roles)
        return [Part("offloaded training state", away, Place.HOST), *self._engine(), sampling]

    def _logprobs(self) -> list[Part]:
        """A forward pass without gradients: a block computes, or a chunk of logits exists."""
        role, pack = self._roles[-1], self._microbatch
        stream = pack.num_tokens * self.shape.hidden_size * self._numerics.compute_bytes
        instants = (
            Part("activations", role.passing(pack) + stream),
            Part("logits", role.logits_forward(pack) + 2 * stream),
        )
        return [
            *self._state(),
            *self._engine_at_rest(),
            Part("gathered weights", role.gathered),
            max(instants, key=lambda part: part.num_bytes),
        ]

    def _update(self) -> Iterator[list[Part]]:
        """Instants of the last backward pass: its loss, its last block and its first block."""
        actor, pack = self._roles[0], self._microbatch
        standing = [
            *self._state(),
            *self._engine_at_rest(),
            Part("gathered weights", actor.gathered),
        ]
        before = Part("gradients", actor.gradients_before_last(pack))
        saved = Part("activations", actor.activations(pack))
        standing.append(self._fragments(saved.num_bytes))
        yield [*standing, before, saved, Part("logits", actor.logits_backward(pack))]
        held = actor.embedding_gradient()
        passing = Part("activations", saved.num_bytes + actor.passing(pack))
        yield [*standing, Part("gradients", before.num_bytes + held), passing]
        last = Part("activations", actor.saved_by_block(pack) + actor.passing(pack))
        yield [*standing, Part("gradients", actor.gradients_at_end(pack) + held), last]

    def _fragments(self, activations: int) -> Part:
        is_alone = self._microbatch.is_only_one and self.config.algorithm.num_updates_per_step == 1
        share = _FRAGMENTS_ALONE if is_alone else _FRAGMENTS_AFTER_ANOTHER
        if self.config.actor.gradient_checkpointing:
            share = _FRAGMENTS_RECOMPUTED
        is_cpu = self.config.cluster.device == "cpu"
        return Part("malloc fragments", int(is_cpu * share * activations))

    def _export(self) -> list[Part]:
        """Rank 0 holds a file of whole weights on the host."""
        whole = self.shape.num_parameters * self._numerics.storage_bytes
        is_copied = self._numerics.is_sharded or self.config.cluster.device == "cuda"
        file = Part("file of weights", is_copied * min(whole, _EXPORT_FILE), Place.HOST)
        return [*self._state(), *self._engine_at_rest(), file]

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
    def _roles(self) -> list[TrainingMemory]:
        numerics = self._numerics
        return [TrainingMemory(role, numerics) for role in roles_of(self.config, self.shape)]

    @cached_property
    def _rollout(self) -> RolloutMemory:
        return RolloutMemory(
            self.shape, self.config.rollout, self.workload, self.max_context_tokens
        )

    @cached_property
    def _microbatch(self) -> Microbatch:
        return self.workload.microbatch(shares_prompts=not self._numerics.has_varlen_attention)

    @property
    def _scores_rollouts(self) -> bool:
        return len(self._roles) > 1 or self.config.algorithm.old_logprobs == "recompute"


def _total(parts: list[Part]) -> int:
    return sum(part.num_bytes for part in parts)
