"""What LoRA costs and spares, beside full fine-tuning doing the same.

Prints a table in Markdown: steps of the default task's size (128 responses of 24 tokens to 16
prompts) on the default model's shape with random weights. A step samples with the newest weights
and takes one optimizer step. The ways alternate within one run, so that a busy machine slows all
alike.

    OMP_NUM_THREADS=1 python -m benchmarks.lora
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from benchmarks.rollout import make_model, make_prompts
from benchmarks.sides.measure import print_head, print_row
from benchmarks.sides.one_rank import build_worker, sampling_of, stand_alone, train_batch
from hybridrl.batch import PromptBatch, spread_over_tokens
from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.optimizer import StepResult
from hybridrl.workers.train.protocol import TrainState

_NUM_WARMUP = 3


class Way:
    """One way to train: a worker with its rollout engine."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.config = load_config(compose(["trainer.run_dir=unused", *words]))
        self.worker = build_worker("actor", ActorRolloutWorker, self.config, folder, fused={})
        self.engine = self.worker._actor
        self.sample_s: list[float] = []
        self.update_s: list[float] = []
        self.sent_bytes: list[float] = []
        self.gradient_bytes = 0
        backend = self.engine.backend
        assert isinstance(backend, FSDP2Backend)
        self._step_optimizer = backend.optimizer.step
        backend.optimizer.step = self._weigh_gradients  # type: ignore[method-assign]

    def step(self, prompts: PromptBatch) -> None:
        """Sample, then learn that early rows were better than late ones."""
        began = time.perf_counter()
        rollouts = self.worker.generate(prompts, sampling_of(self.config))
        assert rollouts is not None
        sampled = time.perf_counter()
        advantages_B = torch.linspace(1.0, -1.0, len(rollouts))
        batch = train_batch(rollouts, spread_over_tokens(advantages_B, rollouts.response_mask_BL))
        prepared = time.perf_counter()
        metrics = self.worker.update(batch, kl_coefficient=0.0)
        self.sample_s.append(sampled - began)
        self.update_s.append(time.perf_counter() - prepared)
        self.sent_bytes.append(metrics["memory/synced_bytes"].value)

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Medians after the warm-up: of sampling, of an update, and of both."""
        sample_s, update_s = self.sample_s[_NUM_WARMUP:], self.update_s[_NUM_WARMUP:]
        steps = [sum(pair) for pair in zip(sample_s, update_s, strict=True)]
        return statistics.median(sample_s), statistics.median(update_s), statistics.median(steps)

    @property
    def mib(self) -> tuple[float, ...]:
        """Parameters, gradients, optimizer, all three, and what is sent in a step."""
        parameters = self.engine.resident_bytes(TrainState.PARAMETERS)
        held = (parameters, self.gradient_bytes, self.engine.resident_bytes(TrainState.OPTIMIZER))
        sent = statistics.median(self.sent_bytes[_NUM_WARMUP:])
        return tuple(size / 2**20 for size in (*held, sum(held), sent))

    def _weigh_gradients(self, loss: Tensor) -> StepResult:
        self.gradient_bytes = self.engine.resident_bytes(TrainState.GRADIENTS)
        return self._step_optimizer(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each way")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    stand_alone()
    adapter, name = ["lora=default", f"lora.rank={arguments.rank}"], f"LoRA rank {arguments.rank}"
    prompts = make_prompts()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        ways = {
            "full fine-tuning": Way([], Path(folder)),
            f"{name}, sync=adapter": Way([*adapter, "lora.sync=adapter"], Path(folder)),
            f"{name}, sync=merged": Way([*adapter, "lora.sync=merged"], Path(folder)),
        }
        for _ in range(_NUM_WARMUP + arguments.rounds):
            for way in ways.values():
                way.step(prompts)
    print(f"{torch.get_num_threads()} thread(s), medians of {arguments.rounds} alternating steps\n")
    print_head(
        *("way", "sample s", "update s", "step s", "/ full", "parameters MiB", "gradients MiB"),
        *("optimizer MiB", "all three MiB", "sent a step MiB"),
    )
    full_s = ways["full fine-tuning"].seconds[-1]
    for name, way in ways.items():
        share = f"{way.seconds[-1] / full_s:.2f}"
        seconds = (f"{one:.3f}" for one in way.seconds)
        print_row(name, *seconds, share, *(f"{size:.2f}" for size in way.mib))


if __name__ == "__main__":
    main()
