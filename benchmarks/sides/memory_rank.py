"""One rank of ``benchmarks.memory_plan``: two steps of the real worker, without Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from hybridrl.batch import (
    CriticBatch,
    LogprobBatch,
    PromptBatch,
    TrainBatch,
    jagged,
    jagged_from,
    row_lengths,
)
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import read_config
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.run.starter import write_random_model
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller import Worker
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.critic import CriticWorker


def main() -> None:
    """Run the rank that the environment names, and print its metrics as JSON."""
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["RANK"])
    config, _ = read_config(compose(overrides))
    if config is None or config.model.starter is None:
        raise ValueError(f"a case cannot be read: {overrides}")
    model = folder / f"model{rank}"
    write_random_model(config.model.starter, model, seed=0)
    worker, critic = build(config, model)
    first = step(worker, critic, config=config, number=0)
    metrics = {
        **{name: first[name] for name in first if "build" in name},
        **step(worker, critic, config=config, number=1),
    }
    print(json.dumps({name: metric.value for name, metric in metrics.items()}), flush=True)
    if critic is not None:
        critic.close()
    worker.close()


def build(config: ExperimentConfig, model: Path) -> tuple[ActorRolloutWorker, CriticWorker | None]:
    """Build the workers as a fused group does: one after the other, in one process."""
    roles: dict[str, Worker] = {}

    def start(role: str, cls: Any) -> Any:  # noqa: ANN401
        worker = cls.__new__(cls, config, model)
        worker.fused = roles
        roles[role] = worker
        cls.__init__(worker, config, model)
        return worker

    actor: ActorRolloutWorker = start("actor", ActorRolloutWorker)
    critic: CriticWorker | None = start("critic", CriticWorker) if config.has_critic else None
    return actor, critic


def step(
    worker: ActorRolloutWorker,
    critic: CriticWorker | None,
    *,
    config: ExperimentConfig,
    number: int,
) -> Metrics:
    """Sample, score if asked for, and update on made-up advantages."""
    num_prompts = config.trainer.num_prompts_per_step // worker.world_size
    generator = torch.Generator().manual_seed(100 * number + worker.rank)
    length = config.data.max_prompt_tokens
    prompts = PromptBatch(
        token_ids_PL=jagged(
            [torch.randint(3, 250, (length,), generator=generator) for _ in range(num_prompts)]
        ),
        prompt_index_P=torch.arange(num_prompts),
        seed_P=torch.arange(num_prompts) + 1000 * number,
        batch_size=[num_prompts],
    )
    sampling = SamplingParams(
        num_responses_per_prompt=config.rollout.num_responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
    )
    rollouts = worker.generate(prompts, sampling)
    assert rollouts is not None
    values = None if critic is None else critic.compute_values(rollouts)
    logprobs = LogprobBatch(batch_size=[len(rollouts)])
    if config.algorithm.scores_rollouts:
        logprobs = worker.compute_logprobs(rollouts)
    lengths_B = row_lengths(rollouts.token_ids_BL)
    advantages_BL = jagged_from(torch.randn(int(lengths_B.sum()), generator=generator), lengths_B)
    learned: Metrics = {}
    if critic is not None and values is not None:
        learned = critic.update(
            CriticBatch(
                token_ids_BL=rollouts.token_ids_BL,
                response_mask_BL=rollouts.response_mask_BL,
                old_values_BL=values.values_BL,
                returns_BL=advantages_BL,
                batch_size=[len(rollouts)],
            )
        )
    batch = TrainBatch(
        token_ids_BL=rollouts.token_ids_BL,
        response_mask_BL=rollouts.response_mask_BL,
        advantages_BL=advantages_BL,
        sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
        old_logprobs_BL=logprobs.old_logprobs_BL,
        reference_logprobs_BL=logprobs.reference_logprobs_BL,
        batch_size=[len(rollouts)],
    )
    return learned | worker.update(batch, kl_coefficient=config.algorithm.kl.coefficient)


if __name__ == "__main__":
    main()
