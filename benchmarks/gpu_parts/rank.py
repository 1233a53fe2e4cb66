"""One rank of the real worker, without Ray: both engines on one device, driven cycle by cycle."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
import torch.distributed as dist

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.server import LOGGING
from benchmarks.gpu_parts.watch import DeviceWatch, free_after_all
from hybridrl.batch import PromptBatch, RolloutBatch, TrainBatch, jagged, spread_over_tokens
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import read_config
from hybridrl.diagnostics import trace
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.sampler import SamplingParams
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.train.protocol import TrainState

_PROBES = 4
_CHUNK_TOKENS = 1024
"""Logits of 152,000 words take 10 GiB for 4096 tokens: too much beside the training state of 7B."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How one rank is configured; a dry run makes all of it small."""

    shape: str
    masters: str = "float32"
    """Type in which the training weights, and with them AdamW's moments, are kept."""

    memory_fraction: float = 0.8
    """Share of the device that the rollout engine takes for weights and KV cache."""

    lora_base: str | None = None
    """``backup``, ``resident`` or ``resend`` trains adapters of rank 32; None trains all."""

    num_prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 64
    response_tokens: int = 128
    checkpointing: bool = True
    pack_tokens: int = 8192
    extra: tuple[str, ...] = ()


@dataclass(slots=True)
class Cycle:
    """What one rollout phase was."""

    seconds: dict[str, float]
    """By stage; ``generate`` is the time inside."""

    num_bytes: dict[str, int]
    """By metric."""

    peaks: dict[str, int]
    """Used bytes of the device by stage."""

    free_after: int | None
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)


def small(setup: Setup) -> Setup:
    """Return the same in a size for a dry run."""
    return replace(
        setup,
        num_prompts=2,
        group_size=2,
        prompt_tokens=8,
        response_tokens=4,
        pack_tokens=64,
        memory_fraction=0.1,
    )


def read_setup(bench: Bench, setup: Setup) -> ExperimentConfig:
    """Compose the configuration of a setup."""
    on_cuda = bench.device.type == "cuda"
    words = [
        "model=hf_folder",
        f"model.path={bench.model(setup.shape)}",
        f"model.dtype={setup.masters if on_cuda else 'float32'}",
        f"cluster={'one_gpu' if on_cuda else 'cpu'}",
        f"rollout={bench.engine}",
        "rollout.sleep=true",
        f"rollout.num_responses_per_prompt={setup.group_size}",
        f"rollout.max_response_tokens={setup.response_tokens}",
        f"data.max_prompt_tokens={setup.prompt_tokens}",
        f"trainer.num_prompts_per_step={setup.num_prompts}",
        f"actor.max_tokens_per_microbatch={setup.pack_tokens}",
        f"actor.gradient_checkpointing={str(setup.checkpointing).lower()}",
        "actor.optimizer.lr=1e-5",
    ]
    if on_cuda:
        words += ["actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16"]
        words += [f"actor.logprob_chunk_tokens={_CHUNK_TOKENS}"]
    if bench.engine == "sglang":
        words += [f"rollout.memory_fraction={setup.memory_fraction}"]
        words += [f"rollout.num_slots={setup.num_prompts * setup.group_size}"]
        arguments = (*bench.engine_args, *(LOGGING if on_cuda else ()))
        words += [f"+rollout.engine_args.{word}" for word in arguments]
    if setup.lora_base is not None:
        words += ["lora=default", "lora.rank=32", f"lora.base={setup.lora_base}"]
    config, problems = read_config(compose([*words, *setup.extra]))
    if config is None:
        raise ValueError(f"this setup cannot be read: {problems}")
    return config


class Rank:
    """The worker of one rank; ends its engine on exit."""

    def __init__(self, bench: Bench, setup: Setup) -> None:
        self.setup = small(setup) if bench.is_dry else setup
        self.config = read_setup(bench, self.setup)
        self._device = bench.device
        self._generator = torch.Generator().manual_seed(0)
        self._num_steps = 0
        stand_alone()
        assert self.config.model.path is not None
        built_from = (self.config, bench.model(setup.shape))
        begin = time.perf_counter()
        self.worker = ActorRolloutWorker.__new__(ActorRolloutWorker, *built_from)
        self.worker.fused = {"actor": self.worker}
        ActorRolloutWorker.__init__(self.worker, *built_from)
        self.start_s = time.perf_counter() - begin
        self.probes = [self._prompts(1, seed=n) for n in range(_PROBES)]

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.worker.close()

    @property
    def managed(self) -> ManagedEngine:
        """The rollout engine with its ledger."""
        managed = self.worker.sharding._engines.managed
        assert managed is not None
        return managed

    @property
    def engine(self) -> RolloutEngine:
        """The rollout engine."""
        return self.managed.engine

    def training_bytes(self) -> dict[str, int]:
        """Return what each part of the training state holds on the device."""
        return {part.value: self.worker._actor.resident_bytes(part) for part in TrainState}

    def step(self) -> dict[str, float]:
        """Sample and update once; returns seconds and metrics."""
        self._num_steps += 1
        begin = time.perf_counter()
        rollouts = self.worker.generate(
            self._prompts(self.setup.num_prompts, seed=100 + self._num_steps), self.sampling()
        )
        middle = time.perf_counter()
        assert rollouts is not None
        metrics = self.worker.update(self._as_batch(rollouts), kl_coefficient=0.0)
        end = time.perf_counter()
        return {name: metric.value for name, metric in metrics.items()} | {
            "generate_s": middle - begin,
            "update_s": end - middle,
        }

    def cycle(self) -> Cycle:
        """Wake the engine, ask the probes greedily one by one, and put it to sleep."""
        self.worker.sharding.take_metrics()
        trace.take()
        with DeviceWatch(self._device) as watch:
            answers, seconds = self._one_phase()
        events = trace.take()
        metrics = self.worker.sharding.take_metrics()
        return Cycle(
            seconds=_stages(metrics) | {"generate": seconds},
            num_bytes=_bytes(metrics),
            peaks=watch.peaks(events),
            free_after=free_after_all(self._device),
            token_ids=[answer[0] for answer in answers],
            logprobs=[answer[1] for answer in answers],
        )

    def _one_phase(self) -> tuple[list[tuple[list[int], list[float]]], float]:
        with self.worker.sharding.rollout_phase() as engine:
            assert engine is not None
            return self.ask(engine)

    def ask(self, engine: RolloutEngine) -> tuple[list[tuple[list[int], list[float]]], float]:
        """Ask the probes one by one; returns tokens and log-probs of each, and the seconds."""
        greedy = replace(self.sampling(), num_responses_per_prompt=1, temperature=0.0)
        begin = time.perf_counter()
        responses = [engine.run(single_turn(probe, greedy))[0] for probe in self.probes]
        seconds = time.perf_counter() - begin
        return [(r.token_ids.tolist(), r.logprobs.tolist()) for r in responses], seconds

    def sampling(self) -> SamplingParams:
        """Return how this setup samples."""
        return SamplingParams(
            num_responses_per_prompt=self.setup.group_size,
            max_response_tokens=self.setup.response_tokens,
            temperature=1.0,
        )

    def _prompts(self, number: int, *, seed: int) -> PromptBatch:
        generator = torch.Generator().manual_seed(seed)
        length = self.setup.prompt_tokens
        return PromptBatch(
            token_ids_PL=jagged(
                [torch.randint(3, 250, (length,), generator=generator) for _ in range(number)]
            ),
            prompt_index_P=torch.arange(number) + 1000 * seed,
            seed_P=torch.arange(number) + 1000 * seed,
            batch_size=[number],
        )

    def prompts(self, number: int, *, seed: int) -> PromptBatch:
        """Draw prompts of the setup's length."""
        return self._prompts(number, seed=seed)

    def _as_batch(self, rollouts: RolloutBatch) -> TrainBatch:
        advantages_B = torch.randn(len(rollouts), generator=self._generator)
        return TrainBatch(
            token_ids_BL=rollouts.token_ids_BL,
            response_mask_BL=rollouts.response_mask_BL,
            advantages_BL=spread_over_tokens(advantages_B, rollouts.response_mask_BL),
            sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
            batch_size=[len(rollouts)],
        )


def medians(cycles: Iterable[Cycle]) -> dict[str, float]:
    """Return the median seconds of each stage."""
    values: dict[str, list[float]] = {}
    for cycle in cycles:
        for name, seconds in cycle.seconds.items():
            values.setdefault(name, []).append(seconds)
    return {name: statistics.median(seconds) for name, seconds in values.items()}


def largest_difference(cycles: list[Cycle]) -> float:
    """Return the largest distance of any probe's log-prob to the first cycle's, in nats.

    Infinite where tokens or lengths differ: then log-probs are of different things.
    """
    first = cycles[0]
    largest = 0.0
    for cycle in cycles[1:]:
        if cycle.token_ids != first.token_ids:
            return float("inf")
        for mine, theirs in zip(cycle.logprobs, first.logprobs, strict=True):
            apart = (abs(a - b) for a, b in zip(mine, theirs, strict=True))
            largest = max([largest, *apart])
    return largest


def _stages(metrics: Metrics) -> dict[str, float]:
    prefix = "time/"
    return {
        name[len(prefix) :].removesuffix("_s"): metric.value
        for name, metric in metrics.items()
        if name.startswith(prefix)
    }


def _bytes(metrics: Metrics) -> dict[str, int]:
    return {
        name.partition("/")[2]: int(metric.value)
        for name, metric in metrics.items()
        if name.endswith("_bytes")
    }


def stand_alone() -> None:
    """Be a group of one: what a launcher would put into the environment."""
    if dist.is_initialized():
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
