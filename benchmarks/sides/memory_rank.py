"""One rank of ``benchmarks.memory_plan``: two steps of the real worker, without Ray."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from benchmarks.sides.one_rank import build_worker, draw_prompts, sampling_of, train_batch
from hybridrl.batch import CriticBatch, jagged_from, row_lengths
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import read_config
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.run.starter import write_random_model
from hybridrl.single_controller import Worker
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.critic import CriticWorker


def main() -> None:
    """Run the rank that the environment names, and print its metrics as JSON."""
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    config, _ = read_config(compose(overrides))
    if config is None or config.model.starter is None:
        raise ValueError(f"a case cannot be read: {overrides}")
    model = folder / f"model{os.environ['RANK']}"
    write_random_model(config.model.starter, model, seed=0)
    fused: dict[str, Worker] = {}
    worker = build_worker("actor", ActorRolloutWorker, config, model, fused=fused)
    critic = None
    if config.has_critic:
        critic = build_worker("critic", CriticWorker, config, model, fused=fused)
    first = step(worker, critic, config=config, number=0)
    metrics = {
        **{name: first[name] for name in first if "build" in name},
        **step(worker, critic, config=config, number=1),
    }
    print(json.dumps({name: metric.value for name, metric in metrics.items()}), flush=True)
    if critic is not None:
        critic.close()
    worker.close()


def step(
    worker: ActorRolloutWorker,
    critic: CriticWorker | None,
    *,
    config: ExperimentConfig,
    number: int,
) -> Metrics:
    """Sample, score if asked for, and update on made-up advantages."""
    num_prompts = config.trainer.num_prompts_per_step // worker.world_size
    seed = 100 * number + worker.rank
    prompts = draw_prompts(num_prompts, config.data.max_prompt_tokens, seed=seed, first_index=seed)
    rollouts = worker.generate(prompts, sampling_of(config))
    assert rollouts is not None
    lengths_B = row_lengths(rollouts.token_ids_BL)
    advantages_BL = jagged_from(torch.randn(int(lengths_B.sum())), lengths_B)
    learned: Metrics = {}
    values = None if critic is None else critic.compute_values(rollouts)
    logprobs = worker.compute_logprobs(rollouts) if config.algorithm.scores_rollouts else None
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
    batch = train_batch(rollouts, advantages_BL, logprobs)
    return learned | worker.update(batch, kl_coefficient=config.algorithm.kl.coefficient)


if __name__ == "__main__":
    main()
