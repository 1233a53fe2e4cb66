"""The workers of one rank in this process, without Ray, and made-up data for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.batch import LogprobBatch, PromptBatch, RolloutBatch, TrainBatch, jagged
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller import Worker
from hybridrl.workers.rollout.sglang.process import free_port

W = TypeVar("W", bound=Worker)


def stand_alone() -> None:
    """Be a group of one: what a launcher would put into the environment."""
    if dist.is_initialized():
        return
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_PORT": free_port()}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")


def build_worker(
    role: str, cls: type[W], config: ExperimentConfig, model: Path, *, fused: dict[str, Worker]
) -> W:
    """Build a worker beside those in ``fused``, as a fused group does, and add it to them."""
    worker = cls.__new__(cls, config, model)
    worker.fused = fused
    fused[role] = worker
    cls.__init__(worker, config, model)  # type: ignore[call-arg]
    return worker


def draw_prompts(number: int, num_tokens: int, *, seed: int, first_index: int = 0) -> PromptBatch:
    """Draw prompts of equal length; an index is also the seed of a prompt's responses."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 250, (num_tokens,), generator=generator) for _ in range(number)]
    indices = torch.arange(number) + first_index
    return PromptBatch(
        token_ids_PL=jagged(rows), prompt_index_P=indices, seed_P=indices, batch_size=[number]
    )


def sampling_of(config: ExperimentConfig) -> SamplingParams:
    """Return how a run of this configuration samples, but that no token ends a response."""
    return SamplingParams(
        num_responses_per_prompt=config.rollout.num_responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
    )


def train_batch(
    rollouts: RolloutBatch, advantages_BL: Tensor, logprobs: LogprobBatch | None = None
) -> TrainBatch:
    """Join responses with their advantages, and with log-probs if the algorithm asks for them."""
    if logprobs is None:
        logprobs = LogprobBatch(batch_size=[len(rollouts)])
    return TrainBatch(
        token_ids_BL=rollouts.token_ids_BL,
        response_mask_BL=rollouts.response_mask_BL,
        advantages_BL=advantages_BL,
        sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
        old_logprobs_BL=logprobs.old_logprobs_BL,
        reference_logprobs_BL=logprobs.reference_logprobs_BL,
        batch_size=[len(rollouts)],
    )
