"""From a configuration and a workload to the memory plan of the fullest rank.

Pure: reads config.json, allocates nothing. What lies in memory in which phase follows the life of
a step (``docs/architecture.md``); sizes are in ``model_memory.py``, ``activations.py`` and
``rollout.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridrl.config.architecture import Architecture, architecture_of
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.activations import Activations
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, Phase
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.planning.split import Split, count_parameters
from hybridrl.planning.workload import Workload

_GIB = 2**30
_MIB = 2**20
_FLOAT32 = 4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_LIBRARIES = 40 * _MIB
"""Code and workspaces of torch that a CPU process touches first in a phase: 10 to 60 MiB."""

_CUDA_RESERVE = 2048 * _MIB
"""CUDA context, NCCL's buffers and what the allocator cannot use. An allowance, not measured."""

_CPU_BUCKET = 256 * _MIB  # workers/sharding/weight_stream.py
_CUDA_BUCKET = int(0.1 * 40 * _GIB)  # a tenth of free memory, as there, of half of 80 GiB
_SERVER = 1300 * _MIB  # of host memory before any weights, unshared; measured with SGLang 0.5.21
_EXPORT_FILE = 4 * _GIB  # workers/train/export.py

Items = list[MemoryItem]


def capacity_bytes(cluster: ClusterConfig) -> int | None:
    """Return the memory of one rank's device.

    ``cluster.device_memory_gib`` if it is set. Else, on a CPU, an equal share of this machine's
    memory (or its container's, if that is less) for each rank; on CUDA None: the size is unknown.
    """
    if cluster.device_memory_gib is not None:
        return int(cluster.device_memory_gib * _GIB)
    if cluster.device == "cuda":
        return None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    return (min(total, int(limit)) if limit.isdigit() else total) // cluster.num_ranks_per_node


def plan_memory(config: ExperimentConfig, *, workload: Workload | None = None) -> MemoryPlan:
    """Compute what a rank of ``mode=train`` holds in each phase, once the first step is done.

    Args:
        config: has passed its checks.
        workload: lengths of rows; None takes the longest that the configuration allows.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
    """
    return _fullest(config, workload, is_critic_pool=False)


def plan_critic_pool(config: ExperimentConfig) -> MemoryPlan | None:
    """Compute what a rank of the critic's own pool holds; None where it has none.

    Raises:
        ModelError: as ``plan_memory``.
    """
    return _fullest(config, None, is_critic_pool=True) if config.has_critic_pool else None


def _fullest(
    config: ExperimentConfig, workload: Workload | None, *, is_critic_pool: bool
) -> MemoryPlan:
    """Plan for a rank of each pipeline stage, and return the plan of the fullest."""
    model, longest = architecture_of(config.model), Workload.longest(config)
    num_stages = config.megatron.pipeline_parallel_size if config.megatron_worlds else 1
    plans = []
    for stage in range(num_stages):
        rank = _Rank(config, model, workload or longest, longest.num_row_tokens, stage)
        phases = rank.phases_of_critic_pool() if is_critic_pool else rank.phases()
        shown = stage if num_stages > 1 else None
        plans.append(MemoryPlan(config.cluster.device, tuple(phases), shown))
    # A server takes the same share of every device: then the next largest phase decides.
    return max(plans, key=lambda plan: sorted(map(plan.peak_bytes, plan.phases), reverse=True))


def _on_host(name: str, num_bytes: int, *, is_measured: bool = True) -> MemoryItem:
    return MemoryItem(name, num_bytes, MemoryKind.HOST, is_measured=is_measured)


def _total(items: Items) -> int:
    return sum(item.num_bytes for item in items)


@dataclass(frozen=True)  # without slots: sizes are computed once
class _Rank:
    """A rank: of the policy, its engine, its reference and a fused critic; or of a critic alone."""

    config: ExperimentConfig
    model: Architecture
    workload: Workload
    max_context_tokens: int
    stage: int

    def phases(self) -> Iterator[Phase]:
        """Yield the phases in the order of a run."""
        models, sleeps = self._policy_models, self.config.rollout.sleep
        if has_critic := self.config.has_critic and not self.config.has_critic_pool:
            models = (*models, self._critic)
        at_rest, algorithm = self._engine_at_rest(), self.config.algorithm
        standing = [*_weights(models), *_optimizer(models), *at_rest]
        load = [*([] if sleeps else self._engine), *_load(models)]
        yield self._phase("build", max(self._engine, load, key=_total), models)
        if sleeps:  # moments lie on the device until their copies on the host are complete
            copies = _on_host("offloaded optimizer", _movable(models))
            yield self._phase("offload_optimizer", [*standing, copies], models)
        yield self._phase("sync", max(self._sync(models), key=_total), models)
        yield self._phase("generate", self._generate(standing, models), models)
        if has_critic:
            yield self._phase("values", [*standing, *self._values()], models)
        if algorithm.kl.placement != "none" or algorithm.old_logprobs == "recompute":
            yield self._phase("logprobs", [*standing, *self._logprobs()], models)
        if has_critic:
            update = self._update(self._critic, self._critic_workload)
            yield self._phase("critic_update", [*standing, *update], models)
        update = self._update(models[0], self.workload)
        yield self._phase("update", [*standing, *update], models)
        yield self._phase("export", [*standing, _checkpoint(models), self._weight_file()], models)

    def phases_of_critic_pool(self) -> Iterator[Phase]:
        """Yield the phases of a rank of the critic's own pool."""
        models = (self._critic,)
        standing = [*_weights(models), *_optimizer(models)]
        yield self._phase("build", _load(models), models)
        yield self._phase("values", [*standing, *self._values()], models)
        update = self._update(self._critic, self._critic_workload)
        yield self._phase("critic_update", [*standing, *update], models)
        yield self._phase("export", [*standing, _checkpoint(models)], models)

    def _phase(self, name: str, items: Items, models: tuple[ModelMemory, ...]) -> Phase:
        """Add what lies there in every phase."""
        items = [*items]
        if self._is_served and models[0].name == "actor":
            rollout = self._rollout
            items.append(_on_host("SGLang's processes", _SERVER, is_measured=False))
            items.append(_on_host("routed experts", rollout.server_routes, is_measured=False))
            items.append(MemoryItem("SGLang itself", rollout.server_resident, is_measured=False))
        if self.config.cluster.device == "cuda":
            items.append(MemoryItem("CUDA, NCCL, fragments", _CUDA_RESERVE, is_measured=False))
        else:
            items.append(MemoryItem("libraries", _LIBRARIES))
        if name not in ("build", "export"):
            # It is written while the step after the save goes on; how long depends on the disk.
            items.append(_checkpoint(models, is_measured=False))
        on_host = sum(model.host_optimizer for model in models)
        items.append(_on_host("optimizer kept on the host", on_host))
        items.append(_on_host("Python, torch, Ray", _PROCESS, is_measured=False))
        return Phase(name, tuple(item for item in items if item.num_bytes))

    # -- the rollout engine ----------------------------------------------------------------------

    @cached_property
    def _rollout(self) -> RolloutMemory:
        cluster = self.config.cluster
        return RolloutMemory(
            self.config,
            self.model,
            self.workload.sampling(self.config),
            self.max_context_tokens,
            capacity_bytes(cluster) if cluster.device == "cuda" else None,
        )

    @property
    def _is_served(self) -> bool:
        """The engine's memory is that of processes which the meter of a run does not see."""
        return self._rollout.is_server

    @property
    def _engine_weights(self) -> MemoryItem:
        sees = not self._is_served
        return MemoryItem("rollout weights", self._rollout.weights, is_measured=sees)

    @property
    def _engine(self) -> Items:
        kv_cache = MemoryItem("KV cache", self._rollout.kv_cache, is_measured=not self._is_served)
        graphs = MemoryItem("SGLang's graphs", self._rollout.server_graphs, is_measured=False)
        return [self._engine_weights, kv_cache, graphs]

    def _engine_at_rest(self) -> Items:
        """What the rollout engine keeps while training has the device."""
        lora, weights = self.config.lora, self._rollout.weights
        if not self.config.rollout.sleep:
            return self._engine
        if lora.sends_adapters and lora.base in ("auto", "resident"):
            return [self._engine_weights]
        if self.config.rollout.backup_weights == "ledger":
            keeps_base = lora.sends_adapters and lora.base == "backup"
            weights = keeps_base * self._rollout.base_weights
        kept = "backup of rollout weights"
        return [_on_host(kept, weights, is_measured=not self._is_served)]

    def _generate(self, standing: Items, models: tuple[ModelMemory, ...]) -> Items:
        sees = not self._is_served
        sampling = MemoryItem("sampling", self._rollout.computing, is_measured=sees)
        if not self.config.rollout.sleep:
            return [*standing, sampling]
        away = sum(model.weights + model.optimizer for model in models)
        return [_on_host("offloaded training state", away), *self._engine, sampling]

    # -- weights on their way --------------------------------------------------------------------

    def _sync(self, models: tuple[ModelMemory, ...]) -> Iterator[Items]:
        """Both copies of the weights are there, and a bucket in between.

        Of an adapter the base is sent before the first step, when there are no moments yet.
        """
        lora, sleeps = self.config.lora, self.config.rollout.sleep
        resident = [*_weights(models), *([self._engine_weights] if sleeps else self._engine)]
        moments = _optimizer(models, is_offloaded=sleeps)
        stream = MemoryItem("weight stream", self._bucket())
        if not lora.sends_adapters:
            yield [*resident, *moments, stream]
            return
        yield [*resident, stream]
        num_numbers = Split().count_adapter(self.model, lora).total
        arrived = MemoryItem("weight stream", num_numbers * _FLOAT32)
        yield [*resident, *moments, stream if sleeps and lora.base == "resend" else arrived]

    def _bucket(self) -> int:
        """A bucket, the tensor that no longer fitted into it, and the buffer of its gather.

        Plain weights are sent as they are; with an adapter merged into them they are new ones.
        """
        lora, actor = self.config.lora, self._policy_models[0]
        if not actor.gathers and not (lora.enabled and lora.sync == "merged"):
            return 0
        largest = Split().count_embedding(self.model) * actor.storage_bytes
        default = _CUDA_BUCKET if self.config.cluster.device == "cuda" else _CPU_BUCKET
        bucket = self.config.rollout.bucket_mib * _MIB or default
        return min(self._model_bytes, bucket + largest) + actor.gathers * largest

    def _weight_file(self) -> MemoryItem:
        """At the end rank 0 writes files of whole weights."""
        is_copied = self._policy_models[0].gathers or self.config.cluster.device == "cuda"
        is_copied |= self.config.lora.enabled  # merged
        return _on_host("file of weights", is_copied * min(self._model_bytes, _EXPORT_FILE))

    @property
    def _model_bytes(self) -> int:
        return count_parameters(self.model) * self._policy_models[0].storage_bytes

    # -- training --------------------------------------------------------------------------------

    @cached_property
    def _policy_models(self) -> tuple[ModelMemory, ...]:
        """The actor and its reference. With LoRA the reference is the actor without adapter."""
        actor = ModelMemory(self.config, "actor", self.model, self.stage)
        if self.config.algorithm.kl.placement == "none" or self.config.lora.enabled:
            return (actor,)
        return actor, ModelMemory(self.config, "reference", self.model, self.stage)

    @cached_property
    def _critic(self) -> ModelMemory:
        return ModelMemory(self.config, "critic", self.model, self.stage)

    @property
    def _critic_workload(self) -> Workload:
        return Workload.of_critic(self.config, self.workload)

    def _values(self) -> Items:
        """The critic's forward pass: no chunk of logits."""
        one = _activations(self._critic, self._critic_workload.scoring())
        computing = MemoryItem("activations", one.passing + one.whole_stream)
        return [MemoryItem("gathered weights", self._critic.gathered), computing]

    def _logprobs(self) -> Items:
        """A forward pass without gradients: a block computes, or a chunk of logits exists."""
        actor = self._policy_models[0]
        one = _activations(actor, self.workload.scoring())
        instants = (
            MemoryItem("activations", one.passing + one.whole_stream),
            MemoryItem("logits", one.logits_forward + 2 * one.whole_stream),
        )
        gathered = MemoryItem("gathered weights", actor.gathered)
        return [gathered, max(instants, key=lambda item: item.num_bytes)]

    def _update(self, model: ModelMemory, workload: Workload) -> Items:
        """The fullest instant of the last backward pass: its loss, its last or its first block."""
        one = _activations(model, workload)
        before, held = model.gradients_before_last(one.microbatch), model.embedding_gradient
        instants: tuple[Items, ...] = (
            [
                MemoryItem("gradients", before),
                MemoryItem("activations", one.saved),
                MemoryItem("logits", one.logits_backward),
            ],
            [
                MemoryItem("gradients", before + held),
                MemoryItem("activations", one.saved + one.passing),
            ],
            [
                MemoryItem("gradients", model.gradients_at_end + held),
                MemoryItem("activations", one.saved_by_block + one.passing),
            ],
        )
        return [
            MemoryItem("gradient buffers", model.buffers),
            MemoryItem("gathered weights", model.gathered),
            _on_host("gradients on the host", model.gradients_on_host),
            *max(instants, key=_total),
        ]


def _activations(model: ModelMemory, workload: Workload) -> Activations:
    return Activations(model, workload.microbatch(shares_prompts=model.shares_prompts))


# -- what models keep ----------------------------------------------------------------------------


def _kind_of(model: ModelMemory) -> MemoryKind:
    """Return where the model's state lies while it computes."""
    return MemoryKind.HOST if model.lies_on_host else MemoryKind.DEVICE


def _weights(models: tuple[ModelMemory, ...]) -> Items:
    return [MemoryItem(f"{m.name} weights", m.weights, _kind_of(m)) for m in models]


def _movable(models: tuple[ModelMemory, ...]) -> int:
    """Add up the optimizers that lie on the device while their models compute."""
    return sum(model.optimizer for model in models if not model.lies_on_host)


def _optimizer(models: tuple[ModelMemory, ...], *, is_offloaded: bool = False) -> Items:
    name = "offloaded optimizer" if is_offloaded else "optimizer"
    kind = MemoryKind.HOST if is_offloaded else MemoryKind.DEVICE
    on_host = sum(model.optimizer for model in models if model.lies_on_host)
    movable = MemoryItem(name, _movable(models), kind)
    return [movable, _on_host("optimizer on the host", on_host)]


def _load(models: tuple[ModelMemory, ...]) -> Items:
    """Weights are there, and the files that they were read from still mapped."""
    buffers = MemoryItem("gradient buffers", max(model.buffers for model in models))
    masters = MemoryItem("optimizer", sum(model.masters for model in models))
    files = _on_host("weight files, mapped", models[0].mapped_files)
    return [*_weights(models), buffers, masters, files]


def _checkpoint(models: tuple[ModelMemory, ...], *, is_measured: bool = True) -> MemoryItem:
    """The copy on the host that a save writes from."""
    saves = models[0].config.checkpoint.every_num_steps > 0
    num_bytes = saves * sum(model.snapshot for model in models)
    return _on_host("checkpoint", num_bytes, is_measured=is_measured)
