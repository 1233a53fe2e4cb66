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
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from benchmarks.rollout import make_model, make_prompts
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.batch import PromptBatch, TrainBatch, spread_over_tokens
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.config.topology import Fused
from hybridrl.main import compose
from hybridrl.models.adapter import Adapter
from hybridrl.sampler import SamplingParams
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.optimizer import StepResult
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState

_CPU = torch.device("cpu")
_SAMPLING = SamplingParams(num_responses_per_prompt=8, max_response_tokens=24, temperature=1.0)
_LOSS = PolicyGradientLoss(policy_loss=Part.of(ppo_clip))


def build_engine(config: ExperimentConfig, folder: Path) -> PolicyEngine:
    """The training engine that the configuration asks for."""
    backend = FSDP2Backend(
        folder,
        config=config.actor,
        model_config=config.model,
        num_total_steps=1000,
        device=_CPU,
        adapter=Adapter(config.lora, seed=0) if config.lora.enabled else None,
    )
    return PolicyEngine(backend)


@dataclass
class Way:
    """One way to train, on one device with its rollout engine."""

    name: str
    config: ExperimentConfig
    folder: Path
    sample_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    gradient_bytes: int = 0

    def __post_init__(self) -> None:
        lora = self.config.lora if self.config.lora.sends_adapters else None
        rollout = HFRolloutEngine(
            self.folder,
            config=self.config.rollout,
            max_context_tokens=self.config.max_row_tokens,
            device=_CPU,
            lora=lora,
        )
        control = ControlGroup(timeout_s=60.0)
        engines = FusedEngines(
            ManagedEngine(rollout, config=self.config.rollout, device=_CPU),
            engines=Fused(1, 1).engines,
            config=self.config.rollout,
            device=_CPU,
            control=control,
        )
        self.manager = ShardingManager(
            engines=engines,
            config=self.config.rollout,
            meter=PeakMeter(_CPU),
            control=control,
            call_timeout_s=60.0,
            lora=lora,
        )
        self.trainer = build_engine(self.config, self.folder)
        self.manager.attach_policy(self.trainer)
        backend = self.trainer.backend
        assert isinstance(backend, FSDP2Backend)
        self._step_optimizer = backend.optimizer.step
        backend.optimizer.step = self._weigh_gradients  # type: ignore[method-assign]

    def step(self, prompts: PromptBatch, version: int) -> None:
        """Sample, then learn that early rows were better than late ones."""
        began = time.perf_counter()
        with self.manager.rollout_phase() as engine:
            assert engine is not None
            responses = engine.run(single_turn(prompts, _SAMPLING))
        rollouts = assemble_rollouts(prompts, responses, policy_version=version)
        self.sample_s.append(time.perf_counter() - began)
        batch = TrainBatch(
            token_ids_BL=rollouts.token_ids_BL,
            response_mask_BL=rollouts.response_mask_BL,
            advantages_BL=spread_over_tokens(
                torch.linspace(1.0, -1.0, len(rollouts)), rollouts.response_mask_BL
            ),
            sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
            batch_size=[len(rollouts)],
        )
        began = time.perf_counter()
        self.trainer.update(
            batch, loss=_LOSS, aggregation=TOKEN_MEAN, temperature=1.0, max_response_tokens=24
        )
        self.update_s.append(time.perf_counter() - began)
        self.manager.weights_changed(version=version + 1)
        self.sent_bytes.append(self.manager.take_metrics()["memory/synced_bytes"].value)

    def row(self, full: Way, num_warmup: int) -> str:
        """Medians after the warm-up, and their ratios to full fine-tuning."""
        sample_s, update_s, step_s = self._medians(num_warmup)
        mib = [
            size / 2**20
            for size in (
                self.trainer.resident_bytes(TrainState.PARAMETERS),
                self.gradient_bytes,
                self.trainer.resident_bytes(TrainState.OPTIMIZER),
                statistics.median(self.sent_bytes[num_warmup:]),
            )
        ]
        return (
            f"| {self.name} | {sample_s:.3f} | {update_s:.3f} | {step_s:.3f} | "
            f"{step_s / full._medians(num_warmup)[2]:.2f} | "
            + " | ".join(f"{size:.2f}" for size in (*mib[:3], sum(mib[:3]), mib[3]))
            + " |"
        )

    def _medians(self, num_warmup: int) -> tuple[float, float, float]:
        sample_s, update_s = self.sample_s[num_warmup:], self.update_s[num_warmup:]
        steps = [sum(pair) for pair in zip(sample_s, update_s, strict=True)]
        return statistics.median(sample_s), statistics.median(update_s), statistics.median(steps)

    def _weigh_gradients(self, loss: Tensor) -> StepResult:
        self.gradient_bytes = self.trainer.resident_bytes(TrainState.GRADIENTS)
        return self._step_optimizer(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each way")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    full = load_config(compose(["trainer.run_dir=unused"]))
    adapter = replace(full, lora=replace(full.lora, enabled=True, rank=arguments.rank))
    merged = replace(adapter, lora=replace(adapter.lora, sync="merged"))
    prompts = make_prompts()
    num_warmup = 3
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        ways = [
            Way("full fine-tuning", full, Path(folder)),
            Way(f"LoRA rank {arguments.rank}, sync=adapter", adapter, Path(folder)),
            Way(f"LoRA rank {arguments.rank}, sync=merged", merged, Path(folder)),
        ]
        for version in range(num_warmup + arguments.rounds):
            for way in ways:
                way.step(prompts, version)
    print(f"{torch.get_num_threads()} thread(s), medians of {arguments.rounds} alternating steps\n")
    print(
        "| way | sample s | update s | step s | / full | parameters MiB | gradients MiB | "
        "optimizer MiB | all three MiB | sent a step MiB |"
    )
    print("|---" * 10 + "|")
    for way in ways:
        print(way.row(ways[0], num_warmup))


if __name__ == "__main__":
    main()
