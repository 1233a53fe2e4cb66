"""The formula: from a configuration and a workload to the memory plan of the fullest rank.

Pure: reads config.json, allocates nothing. What lies in memory in which phase follows the life of
a step (``docs/architecture.md``); each number stands in ``training.py`` or ``sampling.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.planning.capacity import capacity_bytes
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.plan import MemoryItem, MemoryKind, MemoryPlan, Phase
from hybridrl.planning.rank import CriticRank, Rank, total_bytes
from hybridrl.planning.roles import AdapterShape, policy_roles
from hybridrl.planning.sampling import RolloutMemory
from hybridrl.planning.workload import Workload

_MIB = 2**20
_FLOAT32 = 4
_CPU_BUCKET = 256 * _MIB  # workers/sharding/weight_stream.py
_CUDA_BUCKET_SHARE = 0.1  # of free memory, as there; free is taken as half of 80 GiB
_SERVER = 1300 * _MIB  # of host memory before any weights, unshared; measured with SGLang 0.5.21
_EXPORT_FILE = 4 * 2**30  # workers/train/export.py


def plan_memory(config: ExperimentConfig, *, workload: Workload | None = None) -> MemoryPlan:
    """Compute what a rank of ``mode=train`` holds in each phase, once the first step is done.

    Args:
        config: has passed its checks.
        workload: lengths of rows; None takes the longest that the configuration allows.

    Raises:
        ModelError: the model's config.json cannot be read, or is of an unknown family.
    """
    return _PolicyRank.fullest(config, workload)


def plan_critic_pool(config: ExperimentConfig) -> MemoryPlan | None:
    """Compute what a rank of the critic's own pool holds; None where it has none.

    Raises:
        ModelError: as ``plan_memory``.
    """
    if not config.has_critic_pool:
        return None
    return CriticRank.fullest(config, None)


class _PolicyRank(Rank):
    """A rank of the policy, its rollout engine, its reference, and a critic that is fused."""

    def phases(self) -> Iterator[Phase]:
        yield self._phase("build", max([*self._engine()], self._build(), key=total_bytes))
        if self._sleeps:
            yield self._phase("offload_optimizer", self._make_room())
        yield self._phase("sync", max(self._sync(), key=total_bytes))
        yield self._phase("generate", self._generate())
        if self._has_critic:
            yield self._phase("values", self._values())
        if self._scores_rollouts:
            yield self._phase("logprobs", self._logprobs())
        if self._has_critic:
            yield self._phase("critic_update", self._critic_update())
        yield self._phase("update", self._policy_update())
        yield self._phase("export", self._export())

    def _phase(self, name: str, parts: list[MemoryItem]) -> Phase:
        if self._sees_engine:
            return super()._phase(name, parts)
        server = MemoryItem("SGLang's processes", _SERVER, MemoryKind.HOST, is_measured=False)
        on_gpu = MemoryItem("SGLang itself", self._rollout.server_resident, is_measured=False)
        routes = MemoryItem(
            "routed experts", self._rollout.server_routes, MemoryKind.HOST, is_measured=False
        )
        return super()._phase(name, [*parts, server, routes, on_gpu])

    def _engine(self) -> tuple[MemoryItem, ...]:
        kv_cache = MemoryItem("KV cache", self._rollout.kv_cache, is_measured=self._sees_engine)
        graphs = MemoryItem("SGLang's graphs", self._rollout.server_graphs, is_measured=False)
        return self._rollout_weights(), kv_cache, graphs

    def _rollout_weights(self) -> MemoryItem:
        return MemoryItem("rollout weights", self._rollout.weights, is_measured=self._sees_engine)

    @property
    def _sees_engine(self) -> bool:
        return not self._rollout.is_server

    def _at_rest(self) -> list[MemoryItem]:
        if not self._sleeps:
            return [*self._engine()]
        lora, weights = self.config.lora, self._rollout.weights
        if lora.sends_adapters and lora.base in ("auto", "resident"):
            return [self._rollout_weights()]
        if self.config.rollout.backup_weights == "ledger":
            keeps_base = lora.sends_adapters and lora.base == "backup"
            weights = keeps_base * self._rollout.base_weights
        kept = "backup of rollout weights"
        return [MemoryItem(kept, weights, MemoryKind.HOST, is_measured=self._sees_engine)]

    def _build(self) -> list[MemoryItem]:
        """Training engines load; a rollout engine that sleeps has nothing to keep yet."""
        return [*([] if self._sleeps else self._engine()), *self._load()]

    def _make_room(self) -> list[MemoryItem]:
        """Moments lie on the device until their copies on the host are whole."""
        copies = MemoryItem("offloaded optimizer", self._movable_moments, MemoryKind.HOST)
        return [*self._standing(), copies]

    def _sync(self) -> Iterator[list[MemoryItem]]:
        """Both copies of the weights are there, and a bucket in between.

        Of an adapter the base is sent before the first step, when there are no moments yet.
        """
        moments = self._moments(MemoryKind.HOST if self._sleeps else MemoryKind.DEVICE)
        engine = [self._rollout_weights()] if self._sleeps else self._engine()
        resident = [*self._weights(), *engine]
        stream = MemoryItem("weight stream", self._bucket())
        if not self.config.lora.sends_adapters:
            yield [*resident, *moments, stream]
            return
        yield [*resident, stream]
        arrived = MemoryItem("weight stream", self._actor.role.num_adapter_parameters * _FLOAT32)
        again = self._sleeps and self.config.lora.base == "resend"
        yield [*resident, *moments, stream if again else arrived]

    def _bucket(self) -> int:
        """A bucket, the tensor that no longer fitted into it, and the buffer of its gather.

        Plain weights are sent as they are; with an adapter merged into them they are new ones.
        """
        lora = self.config.lora
        if not self._numerics.is_sharded and not (lora.enabled and lora.sync == "merged"):
            return 0
        model_bytes = self.shape.num_parameters * self._numerics.storage_bytes
        largest = self.shape.num_embedding_parameters * self._numerics.storage_bytes
        configured = self.config.rollout.bucket_mib * _MIB
        if not configured and self.config.cluster.device == "cuda":
            configured = int(_CUDA_BUCKET_SHARE * 40 * 2**30)
        gathered = largest if self._numerics.is_sharded else 0
        return min(model_bytes, (configured or _CPU_BUCKET) + largest) + gathered

    def _generate(self) -> list[MemoryItem]:
        sampling = MemoryItem("sampling", self._rollout.sampling, is_measured=self._sees_engine)
        if not self._sleeps:
            return [*self._standing(), sampling]
        away = sum(model.weights + model.optimizer for model in self._models)
        return [
            MemoryItem("offloaded training state", away, MemoryKind.HOST),
            *self._engine(),
            sampling,
        ]

    def _logprobs(self) -> list[MemoryItem]:
        """A forward pass without gradients: a block computes, or a chunk of logits exists."""
        actor = self._actor
        pack = self._scored(self.workload, actor)
        stream = pack.num_tokens * self.shape.hidden_size * self._numerics.compute_bytes
        instants = (
            MemoryItem("activations", actor.passing(pack) + stream),
            MemoryItem("logits", actor.logits_forward(pack) + 2 * stream),
        )
        gathered = MemoryItem("gathered weights", actor.gathered)
        return [*self._standing(), gathered, max(instants, key=lambda part: part.num_bytes)]

    def _policy_update(self) -> list[MemoryItem]:
        pack = self._trained(self.workload, self._actor)
        is_alone = pack.is_only_one and self.config.algorithm.num_updates_per_step == 1
        fragments = self._fragments(
            self.config.actor, is_alone=is_alone, has_adapter=self.config.lora.enabled
        )
        return max(self._update(self._actor, pack, fragments), key=total_bytes)

    def _export(self) -> list[MemoryItem]:
        model_bytes = self.shape.num_parameters * self._numerics.storage_bytes
        is_copied = self._numerics.is_sharded or self.config.cluster.device == "cuda"
        is_copied |= self.config.lora.enabled  # merged
        file = MemoryItem(
            "file of weights", is_copied * min(model_bytes, _EXPORT_FILE), MemoryKind.HOST
        )
        return [*super()._export(), file]

    # -- sizes -----------------------------------------------------------------------------------

    @cached_property
    def _models(self) -> tuple[ModelMemory, ...]:
        actor = self.config.actor
        roles = policy_roles(self.config, self.shape)
        policy = tuple(self._memory(role, self._numerics, actor) for role in roles)
        return (*policy, self._critic) if self._has_critic else policy

    @property
    def _actor(self) -> ModelMemory:
        return self._models[0]

    @cached_property
    def _rollout(self) -> RolloutMemory:
        lora = self.config.lora
        return RolloutMemory(
            self.shape,
            self.config.rollout,
            self.workload.sampling(self.config),
            self.max_context_tokens,
            AdapterShape.of(lora, self.shape) if lora.sends_adapters else None,
            capacity_bytes(self.config.cluster) if self.config.cluster.device == "cuda" else None,
            on_gpu=self.config.cluster.device == "cuda",
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
