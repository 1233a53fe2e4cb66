"""Predicted against measured memory: the table of docs/memory.md.

``python -m benchmarks.memory_plan`` runs some cases, ``... memory_plan CASE ...`` those named. Each
runs in processes of its own, one a rank: two steps of the real worker on a random model, which
hardly ever draws the stop token, so that all rows have their full length, as the plan assumes.
Only the second step counts: moments exist, and malloc has returned what the start had freed. The
table has the largest phase; on a CPU malloc hides the others behind it. Each case runs twice, once
with a ``MALLOC_MMAP_THRESHOLD_`` that leaves malloc no heap in which it could keep freed memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.sides.measure import print_row
from benchmarks.sides.one_rank import build_worker, draw_prompts, sampling_of, train_batch
from hybridrl.batch import CriticBatch, jagged_from, row_lengths
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import read_config
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.planning.plan import Phase
from hybridrl.rehearsal.plan import plan_by_execution
from hybridrl.run.starter import write_random_model
from hybridrl.single_controller import Worker
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.rollout.sglang.process import free_port

MIB = 2**20
_RANK = "--rank"
_UNMEASURED = ("Python, torch, Ray", "checkpoint")
NO_HEAP = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def _shape(hidden_size: int, num_layers: int) -> tuple[str, ...]:
    return f"model.starter.hidden_size={hidden_size}", f"model.starter.num_layers={num_layers}"


def _tokens(number: int) -> tuple[str, ...]:
    return (f"actor.max_tokens_per_microbatch={number}",)


_LONG = (
    *("data.max_prompt_tokens=64", "rollout.max_response_tokens=192"),
    *("trainer.num_prompts_per_step=8", "rollout.num_responses_per_prompt=8"),
)
_SMALL = _shape(192, 4)
_MIDDLE = (*_shape(256, 8), *_LONG, *_tokens(4096))
_LARGE = (*_shape(512, 8), *_LONG)
_CHECKPOINTING = "actor.gradient_checkpointing=true"
CASES = {
    "default": _SMALL,
    "default, long rows": (*_SMALL, *_LONG, *_tokens(8192)),
    "default, long rows, checkpointing": (*_SMALL, *_LONG, _CHECKPOINTING),
    "middle": _MIDDLE,
    "middle, sleep": (*_MIDDLE, "rollout.sleep=true"),
    "middle, two ranks": (
        *_MIDDLE,
        *("cluster.num_ranks_per_node=2", "cluster.num_threads_per_rank=1"),
    ),
    "middle, PPO": (*("algorithm=ppo", *_MIDDLE), "critic.num_minibatches=1"),
    "large": (*_LARGE, *_tokens(2048)),
    "large, checkpointing": (*_LARGE, *_tokens(8192), _CHECKPOINTING),
    "large, LoRA": ("lora=default", *_LARGE, *_tokens(2048)),
    "lora_cpu": ("recipes=cpu/lora", *_SMALL),
    "ppo_cpu": ("recipes=algorithms/ppo", *_SMALL),
}

PUBLISHED = (
    *("default", "default, long rows, checkpointing", "middle, sleep", "middle, two ranks"),
    *("large", "large, LoRA", "ppo_cpu"),
)
"""One of each kind, in some five minutes."""


def main() -> None:
    if sys.argv[1:2] == [_RANK]:
        run_rank(Path(sys.argv[2]), sys.argv[3:])
        return
    print("| case | phase | predicted MiB | without malloc's heap | with it |")
    print("|---|---|---:|---:|---:|", flush=True)
    for name in sys.argv[1:] or PUBLISHED:
        config, _ = read_config(compose(CASES[name]))
        if config is None:
            raise ValueError(f"a case cannot be read: {CASES[name]}")
        phase = max(plan_by_execution(config).phases, key=_measured_bytes)
        predicted = _measured_bytes(phase)
        peaks = [
            run_case(CASES[name], variables)[f"memory/{phase.name}_peak_bytes/max"]
            for variables in (NO_HEAP, {})
        ]
        cells = [f"{peak / MIB:.0f} ({peak / predicted - 1:+.0%})" for peak in peaks]
        print_row(name, phase.name, f"{predicted / MIB:.0f}", *cells)


def _measured_bytes(phase: Phase) -> int:
    """Return what the meter of a run counts: not the process before, nor a copy that is written."""
    return sum(item.num_bytes for item in phase.items if item.name not in _UNMEASURED)


def run_case(overrides: tuple[str, ...], variables: Mapping[str, str]) -> dict[str, float]:
    """Run the ranks of one case; returns the largest value of each metric over the ranks."""
    num_ranks = 2 if "cluster.num_ranks_per_node=2" in overrides else 1
    group = {
        "WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": 2 // num_ranks,
    }
    shared = {**os.environ, **{name: str(value) for name, value in group.items()}, **variables}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.memory_plan", _RANK, folder, *overrides]
        ranks = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        outputs = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    names = dict.fromkeys(name for output in outputs for name in output)
    return {name: max(output.get(name, 0.0) for output in outputs) for name in names}


def run_rank(folder: Path, overrides: Sequence[str]) -> None:
    """Run the rank that the environment names, and print its metrics as JSON."""
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
