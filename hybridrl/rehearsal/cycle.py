"""A rank's cycle, executed: what a run would build and call on it, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools import fake_collectives  # noqa: F401 - shapes of their results
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl import batch, env
from hybridrl.batch import LogprobBatch, PromptBatch, RolloutBatch
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.topology import Colocated, Fused
from hybridrl.data.conversations import lay_out_conversations
from hybridrl.models import load
from hybridrl.models.architecture import architecture_of
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.rehearsal.device import GPU, Block
from hybridrl.rehearsal.gpu import FakeGpu
from hybridrl.rehearsal.model_folder import HollowFile, write_hollow_file
from hybridrl.rehearsal.plan import Executed
from hybridrl.rehearsal.prompts import longest_prompts
from hybridrl.rehearsal.server import (
    Handles,
    RehearsedManager,
    RehearsedServer,
    full_samples,
)
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.advantages import Targets
from hybridrl.trainer.train_batch import build_critic_batch, build_train_batch
from hybridrl.workers import actor_rollout
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.rollout import weight_folder
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang import engine as sglang_engine
from hybridrl.workers.rollout.sglang import sampling as sglang_sampling
from hybridrl.workers.rollout.sglang import transports
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.train import checkpoint, export
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.shards import local_shard

_RESERVE = 2 * 2**30
"""CUDA context, NCCL's buffers and memory that the allocator cannot use. Assumed, not measured."""

_MEGATRON = "hybridrl.rehearsal.megatron"  # imported on request: it needs megatron-core


class Meter(PeakMeter):
    """Notes besides the peak of a scope who had the memory then."""

    def __init__(self, gpu: FakeGpu, executed: Executed, device: torch.device) -> None:
        super().__init__(device)
        self._gpu, self._executed = gpu, executed

    def _look(self) -> None:
        ledgers = (self._gpu.device, self._executed.device), (self._gpu.host, self._executed.host)
        for memory, phases in ledgers:
            moments = memory.fullest_moments() if self._open else {}
            for name, _ in self._open:
                phase = phases.setdefault(name, {})
                for kind, uses in moments.items():
                    if sum(uses.values()) > sum(phase.get(kind, {}).values()):
                        phase[kind] = uses
        super()._look()


def rows_of_two_microbatches(config: ExperimentConfig, *, num_parts: int) -> int:
    """Return a number of rows of full length, no more than a part of a step's rows has."""
    per_microbatch = max(1, config.actor.max_tokens_per_microbatch // config.max_row_tokens)
    return max(1, min(2 * per_microbatch, config.num_rows_per_step // num_parts))


class Cycle:
    """One rank of the policy, with all that shares its device; its engine's server is a stand-in.

    Once a process.
    """

    def __init__(self, config: ExperimentConfig, gpu: FakeGpu, *, rank: int = 0) -> None:
        """Prepare; the models of the configuration are hollow folders, and the GPU is entered."""
        self.config = replace(
            config,
            algorithm=replace(config.algorithm, num_minibatches=1),
            cluster=replace(config.cluster, device="cuda"),
            rollout=replace(config.rollout, engine="sglang"),
        )
        self._asked = config  # of a run on a CPU the GPU shows memory alone
        self.executed = Executed()
        self.handles = Handles()
        self.servers: list[RehearsedServer | RehearsedManager] = []
        self._gpu, self._rank = gpu, rank
        self._folder = Path(config.model.path or "")
        num_ranks = config.num_train_groups
        num_parts = num_ranks * config.algorithm.num_minibatches
        num_rows = rows_of_two_microbatches(config, num_parts=num_parts)
        self._num_responses = max(1, config.rollout.num_responses_per_prompt // num_ranks)
        self._num_prompts = -(-num_rows // self._num_responses)
        self._critic: CriticWorker | None = None
        if config.cluster.device == "cuda":
            gpu.hold(Block(0, GPU, "CUDA, NCCL, fragments"), _RESERVE)
        self._replace_what_needs_a_device()
        register_optimizer_step_pre_hook(self._name_gradients)

    def run(self, *, num_steps: int = 2) -> Executed:
        """Build a rank, take steps, the last one after a checkpoint, and export."""
        self.build()
        for _ in range(num_steps - 1):
            self.step()
        self._save()
        self._gpu.events.clear()
        self.step()
        self.executed.events.update(self._gpu.events)
        self._export()
        return self.executed

    def run_without_computing(self) -> Executed:
        """Build a rank as it is after its first step, save, and sample."""
        self.build()
        for name, engine in self._engines():
            if name in ("actor", "critic"):  # they learn
                engine.backend.optimizer.begin_restore(num_steps=1)
        self._name_what_lasts()
        self._save()
        self.generate()
        return self.executed

    def _save(self) -> None:
        if self.config.checkpoint.every_num_steps:
            self.worker.save(self._folder.parent / "checkpoint")

    def _export(self) -> None:
        with self.worker.sharding.meter("export"):
            self.worker.export_hf(self._folder.parent / "export")

    def build(self) -> None:
        """Build what a rank has."""
        join(self.config.cluster.num_ranks, self._rank)
        servers = RehearsedManager() if self.config.has_servers else None
        if servers is not None:
            self.servers.append(servers)
        fused: dict[str, Any] = {}
        self.worker = fused["actor"] = ActorRolloutWorker.__new__(ActorRolloutWorker)
        self.worker.fused = fused
        self.worker.__init__(self.config, self._folder, servers)  # type: ignore[misc]
        if self.config.has_critic and not self.config.has_critic_pool:
            self._critic = fused["critic"] = CriticWorker.__new__(CriticWorker)
            self._critic.fused = fused
            self._critic.__init__(self.config, self._folder)  # type: ignore[misc]
        self._name_what_lasts()

    def step(self) -> None:
        """Do what a training step does on a rank."""
        rollouts = self.generate()
        for name in self.config.reward.model_paths:
            row = [1] * self.config.max_context_tokens
            self.worker.compute_rewards(lay_out_conversations([row] * len(rollouts)), model=name)
        values_BL = None
        if self._critic is not None:
            values_BL = self._critic.compute_values(rollouts).values_BL
        logprobs = LogprobBatch(batch_size=[len(rollouts)])
        if self.config.algorithm.scores_rollouts:
            logprobs = self.worker.compute_logprobs(rollouts)
        zeros_BL = torch.zeros_like(rollouts.sampler_logprobs_BL)
        if self._critic is not None and values_BL is not None:
            targets = Targets(zeros_BL, zeros_BL, {})
            self._critic.update(build_critic_batch(rollouts, values_BL, targets))
        batch = build_train_batch(rollouts, logprobs, zeros_BL)
        self.worker.update(batch, kl_coefficient=self.config.algorithm.kl.coefficient)
        self._name_what_lasts()

    def generate(self) -> RolloutBatch:
        """Wake the engine, send the weights, sample, and put the engine to sleep."""
        prompts = longest_prompts(self.config, self._num_prompts)
        rollouts = self.worker.generate(prompts, self._sampling)
        if rollouts is None:
            return self._rows_of_others(prompts, version=self.worker._policy_version)
        return rollouts

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            num_responses_per_prompt=self._num_responses,
            max_response_tokens=self.config.rollout.max_response_tokens,
            temperature=self.config.rollout.temperature,
            teacher_top_k=self.config.algorithm.served_top_k,
        )

    def _rows_of_others(self, prompts: PromptBatch, *, version: int) -> RolloutBatch:
        """Return rows of full length, as a rank without an engine gets them to learn from."""
        num_rows = len(prompts) * self._num_responses
        samples = full_samples(num_rows, self._sampling, version=version)
        return assemble_rollouts(prompts, samples, policy_version=version)

    # -- who has memory --------------------------------------------------------------------------

    def _engines(self) -> Iterator[tuple[str, ModelEngine]]:
        worker = self.worker
        for name, engine in (
            ("actor", worker._actor),
            ("reference", worker._reference),
            *worker.teachers_of_their_own().items(),
            ("critic", None if self._critic is None else self._critic._engine),
            *((f"reward model {name}", engine) for name, engine in worker._reward_models.items()),
        ):
            if isinstance(engine, ModelEngine):
                yield name, engine

    def _name_what_lasts(self) -> None:
        for name, engine in self._engines():
            self._gpu.name(engine.backend.tensors(TrainState.OPTIMIZER), "optimizer")
            self._gpu.name(engine.backend.tensors(TrainState.GRADIENTS), "gradients")
            self._gpu.name(engine.backend.tensors(TrainState.PARAMETERS), f"{name} weights")

    def _name_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            self._gpu.name([local_shard(gradient) for gradient in gradients], "gradients")

    # -- stand-ins -------------------------------------------------------------------------------

    def _replace_what_needs_a_device(self) -> None:
        model = architecture_of(self.config.model)
        memory = RolloutMemory(self._asked, model)
        sizes = {
            MemoryTag.WEIGHTS: memory.weights,
            MemoryTag.KV_CACHE: memory.kv_cache + memory.computing,
            MemoryTag.CUDA_GRAPH: memory.server_graphs,
        }
        if isinstance(self.config.topology, Fused | Colocated):
            self._gpu.hold(Block(0, GPU, "SGLang itself"), memory.server_resident)

        def start_server(*args: Any, **kwargs: Any) -> RehearsedServer:  # noqa: ANN401
            server = RehearsedServer(
                *args, handles=self.handles, sizes=sizes, gpu=self._gpu, **kwargs
            )
            self.servers.append(server)
            return server

        store = SimpleNamespace(put=lambda row: (row,), get=lambda rows: [row for (row,) in rows])
        for module, name, stand_in in (
            (load, "_open_safetensors", lambda path: HollowFile(path, self._gpu)),
            (weight_folder, "save_file", write_hollow_file),
            (export, "save_file", write_hollow_file),
            (transports, "save_file", write_hollow_file),
            (checkpoint, "_write", lambda _path, _header, copied: copied),
            (sglang_engine, "StartedServer", start_server),
            (sglang_sampling, "_require_prompt", lambda *_: None),  # it repeats no placeholders
            (transports, "encode", self.handles.make),
            (transports, "_name_gpus_by_serial_number", lambda: None),
            (actor_rollout, "PeakMeter", partial(Meter, self._gpu, self.executed)),
            (batch, "ray", store),
            (Ranks, "share_text", lambda _, text: text),
            (Ranks, "gather", lambda ranks, numbers: torch.tensor([numbers] * ranks.size)),
        ):
            setattr(module, name, stand_in)
        if self.config.megatron_worlds:
            import_module(_MEGATRON).install(self._gpu, self.config.megatron, model)


def join(num_ranks: int, rank: int) -> None:
    """Join a group whose other ranks are like this one."""
    for name, value in {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0}.items():
        env.set_value(name, str(value))
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    make_group: Any = dist.new_group

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        return make_group(*args, backend=backend and "fake", **kwargs)

    dist.new_group = new_group


class CriticCycle(Cycle):
    """A rank that has the critic alone."""

    def __init__(self, config: ExperimentConfig, gpu: FakeGpu) -> None:
        super().__init__(config, gpu)
        num_parts = config.num_critic_groups * config.critic.num_minibatches
        self._num_prompts = rows_of_two_microbatches(config, num_parts=num_parts)
        self._num_responses = 1
        self._meter = Meter(gpu, self.executed, GPU)

    def run(self, *, num_steps: int = 2) -> Executed:
        """Build the rank, and take steps."""
        join(self.config.num_critic_ranks, 0)
        with self._meter("build"):
            worker: Any = CriticWorker.__new__(CriticWorker)
            worker.__init__(self.config, self._folder)
        backend = worker._engine.backend
        prompts = longest_prompts(self.config, self._num_prompts)
        rollouts = self._rows_of_others(prompts, version=0)
        zeros_BL = torch.zeros_like(rollouts.sampler_logprobs_BL)
        for _ in range(num_steps):
            with self._meter("values"):
                values_BL = worker.compute_values(rollouts).values_BL
            batch = build_critic_batch(rollouts, values_BL, Targets(zeros_BL, zeros_BL, {}))
            with self._meter("critic_update"):
                worker.update(batch)
            self._gpu.name(backend.tensors(TrainState.OPTIMIZER), "optimizer")
            self._gpu.name(backend.tensors(TrainState.PARAMETERS), "critic weights")
        return self.executed
