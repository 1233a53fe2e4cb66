"""A rank's cycle, executed: what ``main`` would build and call, on a GPU that is not there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._tools import fake_collectives  # noqa: F401 - the shapes of their results
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl import env
from hybridrl.batch import LogprobBatch, PromptBatch, RolloutBatch, jagged
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.models import load
from hybridrl.planning.rollout import RolloutMemory
from hybridrl.rehearsal.gpu import Block, FakeGpu
from hybridrl.rehearsal.model_folder import HollowFile, write_hollow_file
from hybridrl.rehearsal.server import Handles, RehearsedServer, RehearsedServers
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.train_batch import build_train_batch
from hybridrl.workers import actor_rollout
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang import engine as sglang_engine
from hybridrl.workers.rollout.sglang import weights as sglang_weights
from hybridrl.workers.sharding import weight_proof
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.train.collectives import Ranks

_CONTEXT = 2 * 2**30


class Meter(PeakMeter):
    """Notes besides the peak of each scope who had the memory then."""

    def __init__(self, gpu: FakeGpu, phases: dict[str, dict[str, int]], device: torch.device) -> None:
        super().__init__(device)
        self._gpu, self._phases = gpu, phases

    def _look(self) -> None:
        uses = self._gpu.device.uses_at_peak()
        for name, _ in self._open:
            if sum(uses.values()) > sum(self._phases.get(name, {}).values()):
                self._phases[name] = uses
        super()._look()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one rank."""

    num_prompts: int
    num_responses: int
    """Per prompt, on this rank."""

    @classmethod
    def of(cls, config: ExperimentConfig) -> Rows:
        """Take enough rows of full length for two micro-batches of each update, if there are."""
        num_ranks = config.num_train_groups
        num_responses = max(1, config.rollout.num_responses_per_prompt // num_ranks)
        per_microbatch = max(1, config.actor.max_tokens_per_microbatch // config.max_row_tokens)
        num_rows = 2 * per_microbatch * config.algorithm.num_minibatches
        num_rows = min(num_rows, max(1, config.num_rows_per_step // num_ranks))
        return cls(max(1, -(-num_rows // num_responses)), num_responses)


class Cycle:
    """One rank of the policy, its engine's server a stand-in."""

    def __init__(self, config: ExperimentConfig, model_folder: Path, gpu: FakeGpu) -> None:
        """Prepare.

        Args:
            config: has passed its checks.
            model_folder: of ``write_hollow_model``.
            gpu: entered.
        """
        num_minibatches = min(2, config.algorithm.num_minibatches)
        self.config = replace(
            config,
            model=replace(config.model, path=str(model_folder)),
            algorithm=replace(config.algorithm, num_minibatches=num_minibatches),
        )
        self.gpu = gpu
        self.phases: dict[str, dict[str, int]] = {}
        """Bytes of each use at the fullest moment, by phase."""
        self.handles = Handles()
        self.servers: list[RehearsedServer] = []
        self._folder = model_folder
        self._rows = Rows.of(self.config)
        gpu.hold(Block(0, torch.device("cuda", 0), "CUDA, NCCL, fragments"), _CONTEXT)

    def build(self) -> None:
        """Build what a rank has."""
        _join(self.config.cluster.num_ranks)
        self._replace_what_needs_a_device()
        worker = ActorRolloutWorker.__new__(ActorRolloutWorker)
        worker.fused = {"actor": worker}
        servers = RehearsedServers() if self.config.has_servers else None
        worker.__init__(self.config, self._folder, servers)  # type: ignore[misc]
        self.worker = worker
        self._name_what_lasts()

    def generate(self) -> RolloutBatch:
        """Wake the engine, send the weights, sample, put it to sleep."""
        prompts = [torch.ones(self.config.data.max_prompt_tokens, dtype=torch.int64)]
        index_P = torch.arange(self._rows.num_prompts)
        rollouts = self.worker.generate(
            PromptBatch(
                token_ids_PL=jagged(prompts * self._rows.num_prompts),
                prompt_index_P=index_P,
                seed_P=index_P,
                batch_size=[len(index_P)],
            ),
            SamplingParams(
                num_responses_per_prompt=self._rows.num_responses,
                max_response_tokens=self.config.rollout.max_response_tokens,
                temperature=self.config.rollout.temperature,
            ),
        )
        if rollouts is None:
            raise AssertionError("rank 0 has an engine")
        return rollouts

    def score(self, rollouts: RolloutBatch) -> LogprobBatch:
        """Compute old log-probs, and those of a reference."""
        if self.config.algorithm.scores_rollouts:
            return self.worker.compute_logprobs(rollouts)
        return LogprobBatch(batch_size=[len(rollouts)])

    def update(self, rollouts: RolloutBatch, logprobs: LogprobBatch) -> None:
        """Take the optimizer steps of a step."""
        advantages_BL = torch.ones_like(rollouts.sampler_logprobs_BL)
        batch = build_train_batch(rollouts, logprobs, advantages_BL)
        self.worker.update(batch, kl_coefficient=self.config.algorithm.kl.coefficient)
        self._name_what_lasts()

    def step(self) -> None:
        """Do all that a training step does on a rank."""
        rollouts = self.generate()
        self.update(rollouts, self.score(rollouts))

    def _name_what_lasts(self) -> None:
        from hybridrl.workers.train.protocol import TrainState

        backend = self.worker._actor.backend
        self.gpu.name(backend.tensors(TrainState.PARAMETERS), "actor weights")
        self.gpu.name(backend.tensors(TrainState.OPTIMIZER), "optimizer")
        self.gpu.name(backend.tensors(TrainState.GRADIENTS), "gradients")

    def _replace_what_needs_a_device(self) -> None:
        memory = RolloutMemory(
            self.config,
            _architecture(self.config),
            None,  # type: ignore[arg-type]
            self.config.max_row_tokens,
            self.gpu.num_bytes,
        )
        sizes = {
            MemoryTag.WEIGHTS: memory.weights,
            MemoryTag.KV_CACHE: memory.kv_cache,
            MemoryTag.CUDA_GRAPH: memory.server_graphs,
        }

        def start_server(*args: Any, **kwargs: Any) -> RehearsedServer:  # noqa: ANN401
            server = RehearsedServer(*args, handles=self.handles, sizes=sizes, gpu=self.gpu, **kwargs)
            self.servers.append(server)
            return server

        modules: Any = (sglang_engine, sglang_weights, actor_rollout)
        if self.config.megatron_worlds:
            import_module("hybridrl.rehearsal.megatron").install(
                self.gpu, self.config.megatron, _architecture(self.config)
            )
        open_file = load._open_safetensors
        load._open_safetensors = lambda path: HollowFile(open_file(path), self.gpu)
        Ranks.gather = lambda ranks, numbers: torch.tensor([numbers] * ranks.size)
        weight_proof.save_file = write_hollow_file
        sglang_engine.Server = start_server
        sglang_weights.encode = self.handles.make
        actor_rollout.PeakMeter = partial(Meter, self.gpu, self.phases)


def _architecture(config: ExperimentConfig) -> Any:
    from hybridrl.config.architecture import architecture_of

    return architecture_of(config.model)


def _join(num_ranks: int) -> None:
    """Be rank 0 of a group whose other ranks are like this one."""
    for name, value in {"RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0}.items():
        env.set_value(name, str(value))
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    make_group = dist.new_group

    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        return make_group(*args, backend=None if backend is None else "fake", **kwargs)

    dist.new_group = new_group
