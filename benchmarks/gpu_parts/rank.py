"""One rank of the real worker, without Ray: both engines on one device, driven cycle by cycle."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.gpu_parts.bench import Bench
from benchmarks.sides.one_rank import (
    build_worker,
    draw_prompts,
    sampling_of,
    stand_alone,
    train_batch,
)
from hybridrl.batch import PromptBatch, spread_over_tokens
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import read_config
from hybridrl.diagnostics import trace
from hybridrl.diagnostics.trace_file import Event
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.sglang.client import checksums_of
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.train.protocol import TrainState

_PROBES = 4
_CHUNK_TOKENS = 1024
"""Logits of 152,000 words take 10 GiB for 4096 tokens: too much beside the training state of 7B."""

_EVERY_S = 0.002
_CAPTURE = re.compile(r"Capture (.+?) begin\.")
_LOGGING = ("log_level=info", "log_level_http=warning")
"""Engine arguments without which the server does not write what is counted here."""


class DeviceWatch:
    """Samples the device's used memory while it is open: training and engine share the device.

    The engine is a process of its own, so torch's own peak would not see it. On a CPU it sees
    nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[int, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceWatch:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def peaks(self, events: Iterable[Event]) -> dict[str, int]:
        """Return the largest number of used bytes seen within each kind of span.

        A stage shorter than the interval of 2 ms may be missing.
        """
        found: dict[str, int] = {}
        for span in events:
            begin_ns, end_ns = 1000 * span["ts"], 1000 * (span["ts"] + span["dur"])
            within = [used for at, used in self._samples if begin_ns <= at <= end_ns]
            if within:
                found[span["name"]] = max(found.get(span["name"], 0), *within)
        return found

    def _sample(self) -> None:
        while not self._end.wait(_EVERY_S):
            free, total = torch.cuda.mem_get_info(self._device)
            self._samples.append((time.time_ns(), total - free))


def free_after_all(device: torch.device) -> int | None:
    """Return the free bytes once nothing runs and nothing is cached; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


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
        arguments = (*bench.engine_args, *(_LOGGING if on_cuda else ()))
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
        begin = time.perf_counter()
        self.worker: ActorRolloutWorker = build_worker(
            "actor", ActorRolloutWorker, self.config, bench.model(setup.shape), fused={}
        )
        self.start_s = time.perf_counter() - begin
        self.probes = [self.prompts(1, seed=n) for n in range(_PROBES)]

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    @property
    def managed(self) -> ManagedEngine:
        managed = self.worker.sharding._engines.managed
        assert managed is not None
        return managed

    @property
    def engine(self) -> RolloutEngine:
        return self.managed.engine

    def training_bytes(self) -> dict[str, int]:
        return {part.value: self.worker._actor.resident_bytes(part) for part in TrainState}

    def step(self) -> dict[str, float]:
        """Sample and update once; returns seconds and metrics."""
        self._num_steps += 1
        begin = time.perf_counter()
        prompts = self.prompts(self.setup.num_prompts, seed=100 + self._num_steps)
        rollouts = self.worker.generate(prompts, sampling_of(self.config))
        middle = time.perf_counter()
        assert rollouts is not None
        advantages_B = torch.randn(len(rollouts), generator=self._generator)
        batch = train_batch(rollouts, spread_over_tokens(advantages_B, rollouts.response_mask_BL))
        metrics = self.worker.update(batch, kl_coefficient=0.0)
        end = time.perf_counter()
        return {name: metric.value for name, metric in metrics.items()} | {
            "generate_s": middle - begin,
            "update_s": end - middle,
        }

    def cycle(self) -> Cycle:
        """Wake the engine, ask the probes greedily one by one, and put it to sleep."""
        self.worker.sharding.take_metrics()
        trace.take()
        with DeviceWatch(self._device) as watch, self.worker.sharding.rollout_phase() as engine:
            assert engine is not None
            answers, seconds = self.ask(engine)
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

    def ask(self, engine: RolloutEngine) -> tuple[list[tuple[list[int], list[float]]], float]:
        """Ask the probes one by one; returns tokens and log-probs of each, and the seconds."""
        greedy = replace(sampling_of(self.config), num_responses_per_prompt=1, temperature=0.0)
        begin = time.perf_counter()
        with trace.span("sample"):
            responses = [engine.run(single_turn(probe, greedy))[0] for probe in self.probes]
        seconds = time.perf_counter() - begin
        return [(r.token_ids.tolist(), r.logprobs.tolist()) for r in responses], seconds

    def prompts(self, number: int, *, seed: int) -> PromptBatch:
        return draw_prompts(number, self.setup.prompt_tokens, seed=seed, first_index=1000 * seed)


def medians(cycles: Iterable[Cycle]) -> dict[str, float]:
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
    return {
        name.removeprefix("time/").removesuffix("_s"): metric.value
        for name, metric in metrics.items()
        if name.startswith("time/")
    }


def _bytes(metrics: Metrics) -> dict[str, int]:
    return {
        name.partition("/")[2]: int(metric.value)
        for name, metric in metrics.items()
        if name.endswith("_bytes")
    }


def server_of(engine: RolloutEngine) -> Any:  # noqa: ANN401 - `Server`, which only SGLang's has
    """Return the server of an engine that has one; None of the embedded engine."""
    return vars(engine).get("_server")


def count_graph_captures(engine: RolloutEngine) -> int | None:
    """Return how often the server captured its CUDA graphs of one kind; the most of any kind.

    SGLang captures graphs of decode steps and, where it chooses to, of prefill; each kind once, at
    its start. None where there is no server, or its log shows no capture.
    """
    server = server_of(engine)
    if server is None:
        return None
    text = server.process.log_file.read_text(encoding="utf-8", errors="replace")
    kinds = Counter(_CAPTURE.findall(text))
    return max(kinds.values()) if kinds else None


def checksums(engine: RolloutEngine) -> dict[str, str]:
    """Return the server's own checksum of each tensor that it compares, by its name there."""
    server = server_of(engine)
    if server is None:
        raise TypeError("only a server tells checksums of its tensors")
    answer = server.post("/weights_checker", action="checksum")
    return {f"{rank}:{name}": value for (rank, name), value in checksums_of(answer).items()}
