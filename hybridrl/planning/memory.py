"""From a configuration and a workload to the memory plan of the fullest rank.

Pure: reads config.json, allocates nothing. The contents of memory in each phase follow a step
(``docs/architecture.md``). Sizes are in ``model_memory.py``, ``activations.py`` and
``rollout.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hybridrl.config.architecture import Architecture, architecture_of, read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.activations import Activations
from hybridrl.planning.model_memory import REWARD_MODEL, ModelMemory
from hybridrl.planning.plan import (
    MAPPED_FILES,
    MemoryItem,
    MemoryKind,
    MemoryPlan,
    Phase,
    capacity_bytes,
)
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.planning.split import Split, count_parameters
from hybridrl.planning.workload import Workload

_GIB = 2**30
_MIB = 2**20
_FLOAT32 = 4

_PROCESS = 640 * _MIB
"""Python, torch, transformers and Ray in a worker before it builds engines; measured on Linux."""

_LIBRARIES = 40 * _MIB
"""Code and workspaces of torch that a CPU process first touches in a phase: 10 to 60 MiB."""

_CUDA_RESERVE = 2048 * _MIB
"""CUDA context, NCCL's buffers and memory that the allocator cannot use. Assumed, not measured."""

_CPU_BUCKET = 256 * _MIB  # workers/sharding/weight_stream.py
_CUDA_BUCKET = int(0.1 * 40 * _GIB)  # a tenth of free memory, as there, of half of 80 GiB
_SERVER = 1300 * _MIB  # host memory before any weights, not shared; measured with SGLang 0.5.21
_EXPORT_FILE = 4 * _GIB  # workers/train/export.py

Items = list[MemoryItem]

_HOST_OR_DEVICE = {True: MemoryKind.HOST, False: MemoryKind.DEVICE}


def plan_memory(config: ExperimentConfig, *, workload: Workload | None = None) -> MemoryPlan:
    """Compute the memory that a rank of ``mode=train`` holds in each phase after the first step.

    Args:
        config: has passed its checks.
        workload: lengths of rows; None takes the longest rows that the configuration allows.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
    """
    return _fullest(config, workload, is_critic_pool=False)


def plan_critic_pool(config: ExperimentConfig) -> MemoryPlan | None:
    """Compute the memory that a rank of the critic's own pool holds; None without such a pool.

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
        rank = _Rank(
            config, model, workload or longest, longest.num_row_tokens, stage, is_critic_pool
        )
        shown = stage if num_stages > 1 else None
        plans.append(MemoryPlan(config.cluster.device, tuple(rank.phases()), shown))
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
    is_critic_pool: bool

    @cached_property
    def _models(self) -> tuple[ModelMemory, ...]:
        """Models with training state on this rank. With LoRA the actor is its own reference."""
        config, algorithm, models = self.config, self.config.algorithm, {"actor": self.model}
        if algorithm.kl.placement != "none" and not config.lora.enabled:
            models["reference"] = self.model
        if algorithm.teacher_path is not None:
            models["teacher"] = read_architecture(Path(algorithm.teacher_path))
        for name, path in config.reward.model_paths.items():
            models[f"{REWARD_MODEL}{name}"] = read_architecture(Path(path))
        if config.has_critic and not config.has_critic_pool:
            models["critic"] = self.model
        models = {"critic": self.model} if self.is_critic_pool else models
        return tuple(ModelMemory(config, name, model, self.stage) for name, model in models.items())

    def phases(self) -> Iterator[Phase]:
        """Yield the phases in the order of a run."""
        first, last = self._models[0], self._models[-1]
        algorithm, sleeps = self.config.algorithm, self.config.rollout.sleep
        standing = [*self._weights, *self._optimizer(), *self._engine_at_rest]
        yield self._phase("build", self._build())
        if not self.is_critic_pool:
            if sleeps:  # moments stay on the device until their copies on the host are complete
                copies = _on_host("offloaded optimizer", self._movable)
                yield self._phase("offload_optimizer", [*standing, copies])
            yield self._phase("sync", max(self._sync(), key=_total))
            yield self._phase("generate", self._generate(standing))
            if reward_models := [model for model in self._models if model.is_reward_model]:
                passes = [self._forward(model) for model in reward_models]
                yield self._phase("reward", [*standing, *max(passes, key=_total)])
        if last.is_critic:
            yield self._phase("values", [*standing, *self._forward(last)])
        scores = algorithm.scores_rollouts
        if scores and not self.is_critic_pool:
            yield self._phase("logprobs", [*standing, *self._forward(first)])
        if last.is_critic:
            yield self._phase("critic_update", [*standing, *self._update(last)])
        if not self.is_critic_pool:
            yield self._phase("update", [*standing, *self._update(first)])
        yield self._phase("export", [*standing, self._checkpoint(), *self._weight_file()])

    def _phase(self, name: str, items: Items) -> Phase:
        """Add the items that are in memory in every phase."""
        items = [*items]
        if self._is_served and self._has_engine:
            rollout = self._rollout
            items.append(_on_host("SGLang's processes", _SERVER, is_measured=False))
            items.append(_on_host("routed experts", rollout.server_routes, is_measured=False))
            items.append(MemoryItem("SGLang itself", rollout.server_resident, is_measured=False))
        if self._is_cuda:
            items.append(MemoryItem("CUDA, NCCL, fragments", _CUDA_RESERVE, is_measured=False))
        else:
            items.append(MemoryItem("libraries", _LIBRARIES))
        if name not in ("build", "export"):
            # It is written during the step after the save; for how long depends on the disk.
            items.append(self._checkpoint(is_measured=False))
        on_host = sum(model.host_optimizer for model in self._models)
        items.append(_on_host("optimizer kept on the host", on_host))
        items.append(_on_host("Python, torch, Ray", _PROCESS, is_measured=False))
        return Phase(name, tuple(item for item in items if item.num_bytes))

    @property
    def _is_cuda(self) -> bool:
        return self.config.cluster.device == "cuda"

    # -- training state --------------------------------------------------------------------------

    @property
    def _weights(self) -> Items:
        return [
            MemoryItem(f"{m.name} weights", m.weights, _HOST_OR_DEVICE[m.lies_on_host])
            for m in self._models
        ]

    @property
    def _movable(self) -> int:
        """Bytes of the optimizers that stay on the device while their models compute."""
        return sum(model.optimizer for model in self._models if not model.lies_on_host)

    def _optimizer(self, *, is_offloaded: bool = False) -> Items:
        name = "offloaded optimizer" if is_offloaded else "optimizer"
        on_host = sum(model.optimizer for model in self._models if model.lies_on_host)
        return [
            MemoryItem(name, self._movable, _HOST_OR_DEVICE[is_offloaded]),
            _on_host("optimizer on the host", on_host),
        ]

    def _checkpoint(self, *, is_measured: bool = True) -> MemoryItem:
        """The host copy from which a save writes."""
        saves = self.config.checkpoint.every_num_steps > 0
        num_bytes = saves * sum(model.snapshot for model in self._models)
        return _on_host("checkpoint", num_bytes, is_measured=is_measured)

    def _build(self) -> Items:
        """The engine alone, or with training weights and the files from which they are read."""
        buffers = MemoryItem("gradient buffers", max(model.buffers for model in self._models))
        masters = MemoryItem("optimizer", sum(model.masters for model in self._models))
        files = _on_host(MAPPED_FILES, self._models[0].mapped_files)
        load = [*self._weights, buffers, masters, files]
        if not self._has_engine:
            return load
        sleeps = self.config.rollout.sleep
        return max(self._engine, [*([] if sleeps else self._engine), *load], key=_total)

    # -- passes ----------------------------------------------------------------------------------

    def _pass(self, model: ModelMemory, *, is_update: bool) -> Activations:
        workload = self.workload
        if model.is_critic:
            workload = workload.of_critic(self.config)
        if model.is_reward_model:  # each conversation is computed by itself
            workload = replace(workload, group_size=1)
        if not is_update:
            workload = workload.scoring()
        return Activations(model, workload.microbatch(shares_prompts=model.shares_prompts))

    def _forward(self, model: ModelMemory) -> Items:
        """A pass without gradients: either a block computes, or a chunk of logits exists."""
        activations = self._pass(model, is_update=False)
        computing = MemoryItem("activations", activations.passing + activations.whole_stream)
        logits = MemoryItem("logits", activations.logits_forward + 2 * activations.whole_stream)
        gathered = MemoryItem("gathered weights", model.gathered)
        return [gathered, max(computing, logits, key=lambda item: item.num_bytes)]

    def _update(self, model: ModelMemory) -> Items:
        """The fullest instant of the last backward pass: its loss, its last or its first block."""
        activations = self._pass(model, is_update=True)
        before, held = model.gradients_before_last(activations.microbatch), model.embedding_gradient
        instants = (
            {
                "gradients": before,
                "activations": activations.saved,
                "logits": activations.logits_backward,
            },
            {"gradients": before + held, "activations": activations.saved + activations.passing},
            {
                "gradients": model.gradients_at_end + held,
                "activations": activations.saved_by_block + activations.passing,
            },
        )
        fullest = max(instants, key=lambda instant: sum(instant.values()))
        return [
            MemoryItem("gradient buffers", model.buffers),
            MemoryItem("gathered weights", model.gathered),
            _on_host("gradients on the host", model.gradients_on_host),
            *(MemoryItem(name, num_bytes) for name, num_bytes in fullest.items()),
        ]

    # -- the rollout engine ----------------------------------------------------------------------

    @cached_property
    def _rollout(self) -> RolloutMemory:
        capacity = capacity_bytes(self.config.cluster) if self._is_cuda else None
        workload = self.workload.sampling(self.config)
        return RolloutMemory(self.config, self.model, workload, self.max_context_tokens, capacity)

    @property
    def _has_engine(self) -> bool:
        """Whether a rank has a rollout engine. Without one it may read a recording."""
        servers_alone = self.config.has_servers and not self.config.has_fused_engines
        return not self.is_critic_pool and not servers_alone

    @property
    def _is_served(self) -> bool:
        """The engine's memory belongs to processes that a run's memory meter does not see."""
        return self._rollout.is_server

    @property
    def _engine_weights(self) -> MemoryItem:
        is_measured = not self._is_served
        return MemoryItem("rollout weights", self._rollout.weights, is_measured=is_measured)

    @property
    def _engine(self) -> Items:
        kv_cache = MemoryItem("KV cache", self._rollout.kv_cache, is_measured=not self._is_served)
        graphs = MemoryItem("SGLang's graphs", self._rollout.server_graphs, is_measured=False)
        return [self._engine_weights, kv_cache, graphs]

    @property
    def _engine_at_rest(self) -> Items:
        """The rollout engine's memory while training has the device."""
        lora, weights = self.config.lora, self._rollout.weights
        if not self._has_engine:
            return []
        if not self.config.rollout.sleep:
            return self._engine
        if lora.sends_adapters and lora.base in ("auto", "resident"):
            return [self._engine_weights]
        if self.config.rollout.backup_weights == "ledger":
            keeps_base = lora.sends_adapters and lora.base == "backup"
            weights = keeps_base * self._rollout.base_weights
        kept = "backup of rollout weights"
        return [_on_host(kept, weights, is_measured=not self._is_served)]

    def _generate(self, standing: Items) -> Items:
        if not self._has_engine:
            return standing
        is_measured = not self._is_served
        sampling = MemoryItem("sampling", self._rollout.computing, is_measured=is_measured)
        if not self.config.rollout.sleep:
            return [*standing, sampling]
        away = sum(model.weights + model.optimizer for model in self._models)
        return [_on_host("offloaded training state", away), *self._engine, sampling]

    # -- weights on their way --------------------------------------------------------------------

    def _sync(self) -> Iterator[Items]:
        """Both copies of the weights, and a bucket in between.

        With an adapter the base is sent before the first step, when there are no moments yet.
        """
        lora, sleeps = self.config.lora, self.config.rollout.sleep
        engine = [self._engine_weights] if sleeps else self._engine
        resident = [*self._weights, *(engine if self._has_engine else [])]
        moments = self._optimizer(is_offloaded=sleeps)
        stream = MemoryItem("weight stream", self._bucket())
        if not lora.sends_adapters:
            yield [*resident, *moments, stream]
            return
        yield [*resident, stream]
        num_numbers = Split().count_adapter(self.model, lora).total
        arrived = MemoryItem("weight stream", num_numbers * _FLOAT32)
        yield [*resident, *moments, stream if sleeps and lora.base == "resend" else arrived]

    def _bucket(self) -> int:
        """A bucket, the tensor that did not fit into it, and the buffer of its gather.

        Plain weights are sent as they are; weights with a merged adapter are new tensors.
        """
        lora, actor = self.config.lora, self._models[0]
        if not actor.gathers and not (lora.enabled and lora.sync == "merged"):
            return 0
        count = Split().count_embedding if actor.is_megatron else Split().largest_gathered
        largest = count(self.model) * actor.storage_bytes
        bucket = self.config.rollout.bucket_mib * _MIB
        bucket = bucket or (_CUDA_BUCKET if self._is_cuda else _CPU_BUCKET)
        return min(self._model_bytes, bucket + largest) + actor.gathers * largest

    def _weight_file(self) -> Items:
        """At the end, rank 0 of the policy writes all weights to files."""
        if self.is_critic_pool:
            return []
        is_copied = self._models[0].gathers or self._is_cuda or self.config.lora.enabled
        return [_on_host("file of weights", is_copied * min(self._model_bytes, _EXPORT_FILE))]

    @property
    def _model_bytes(self) -> int:
        return count_parameters(self.model) * self._models[0].storage_bytes
