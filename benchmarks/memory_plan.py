"""Predicted against measured memory, phase by phase: the table of docs/memory.md.

``python -m benchmarks.memory_plan`` runs every case, ``... memory_plan CASE ...`` those named. Each
runs in processes of its own, one a rank: two steps of the real worker on a random model, which
hardly ever draws the stop token, so that all rows have their full length, as the plan assumes.
``VERBOSE=1`` shows the parts. Only the second step is looked at: moments exist, and memory that
malloc kept was given back.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.load import read_config
from hybridrl.main import compose
from hybridrl.planning.memory import plan_memory
from hybridrl.planning.workload import Workload

MIB = 2**20
SMALL = (192, 4, 6, 2, 512)
MIDDLE = (256, 8, 8, 4, 1024)
LARGE = (512, 8, 8, 4, 1536)
WIDE = (512, 2, 8, 8, 2048)


def _shape(sizes: tuple[int, ...], vocab_size: int = 512) -> tuple[str, ...]:
    names = ("hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads")
    keys = (*names, "intermediate_size")
    values = dict(zip(keys, sizes, strict=True))
    values |= {"vocab_size": vocab_size, "max_position_embeddings": 4096}
    return tuple(f"model.starter.{key}={value}" for key, value in values.items())


def _rows(prompt: int, response: int, *, prompts: int, group: int = 8) -> tuple[str, ...]:
    return (
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_response_tokens={response}",
        f"trainer.num_prompts_per_step={prompts}",
        f"rollout.num_responses_per_prompt={group}",
    )


SLEEP = ("rollout.sleep=true",)
CHECKPOINTING = ("actor.gradient_checkpointing=true",)
REFERENCE = (
    *("algorithm.old_logprobs=recompute", "algorithm.kl.placement=loss"),
    "algorithm.kl.coefficient=0.001",
)
TWO_RANKS = ("cluster.num_ranks_per_node=2", "cluster.num_threads_per_rank=1")


def _tokens(number: int) -> tuple[str, ...]:
    return (f"actor.max_tokens_per_microbatch={number}",)


CRITIC = ("critic.max_tokens_per_microbatch=4096", "critic.num_minibatches=1")
LONG = _rows(64, 192, prompts=8)
CASES = {
    "default": _shape(SMALL),
    "default, long rows": (*_shape(SMALL), *LONG, *_tokens(8192)),
    "default, long rows, checkpointing": (*_shape(SMALL), *LONG, *CHECKPOINTING),
    "middle": (*_shape(MIDDLE), *LONG, *_tokens(4096)),
    "middle, sleep": (*_shape(MIDDLE), *LONG, *_tokens(4096), *SLEEP),
    "middle, reference": (*_shape(MIDDLE), *LONG, *_tokens(4096), *REFERENCE),
    "middle, two ranks": (*_shape(MIDDLE), *LONG, *_tokens(4096), *TWO_RANKS),
    "large": (*_shape(LARGE), *LONG, *_tokens(2048)),
    "large, checkpointing": (*_shape(LARGE), *LONG, *_tokens(8192), *CHECKPOINTING),
    "large, sleep, reference": (*_shape(LARGE), *LONG, *_tokens(2048), *SLEEP, *REFERENCE),
    "large, two ranks, sleep": (*_shape(LARGE), *LONG, *_tokens(2048), *TWO_RANKS, *SLEEP),
    "wide, vocabulary of 32768": (
        *_shape(WIDE, 32768),
        *LONG,
        *_tokens(2048),
        "actor.logprob_chunk_tokens=512",
    ),
    "lora_cpu": ("recipes=lora_cpu", *_shape(SMALL)),
    "lora_cpu, merged": ("recipes=lora_cpu", *_shape(SMALL), "lora.sync=merged"),
    "ppo_cpu": ("recipes=ppo_cpu", *_shape(SMALL)),
    "large, LoRA": ("lora=default", *_shape(LARGE), *LONG, *_tokens(2048)),
    "large, LoRA, sleep": ("lora=default", *_shape(LARGE), *LONG, *_tokens(2048), *SLEEP),
    "large, LoRA, checkpointing": (
        *("lora=default", *_shape(LARGE), *LONG, *_tokens(8192)),
        *CHECKPOINTING,
    ),
    "middle, PPO": ("algorithm=ppo", *_shape(MIDDLE), *LONG, *_tokens(4096), *CRITIC),
    "middle, PPO, sleep": (
        *("algorithm=ppo", *_shape(MIDDLE), *LONG, *_tokens(4096), *CRITIC),
        *SLEEP,
    ),
    "large, bfloat16 engine": (*_shape(LARGE), *LONG, *_tokens(2048), "rollout.dtype=bfloat16"),
}


def main() -> None:
    """Run the cases named on the command line, or all of them."""
    print("case, phase: predicted MiB, measured MiB, error")
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            measured = run_case(CASES[name], Path(folder))
        for line in compare(CASES[name], measured):
            print(f"{name}, {line}", flush=True)


def compare(overrides: tuple[str, ...], measured: dict[str, float]) -> Iterator[str]:
    """Yield a line per phase: predicted for the tokens of the step, measured, error."""
    config, _ = read_config(compose(overrides))
    if config is None:
        raise ValueError(f"a case cannot be read: {overrides}")
    workload = Workload.longest(config).measured(
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=config.rollout.max_response_tokens,
        microbatch_tokens=measured["data/train_tokens"] / measured["data/microbatches"],
    )
    plan = plan_memory(config, workload=workload)
    for phase in plan.phases:
        found = measured.get(f"memory/{phase.name}_peak_bytes/max")
        if found is None:
            continue
        predicted = plan.measured_bytes(phase)
        line = (
            f"{phase.name}: {predicted / MIB:.0f}, {found / MIB:.0f}, {found / predicted - 1:+.0%}"
        )
        if "VERBOSE" in os.environ:
            items = (f"{item.name} {item.num_bytes / MIB:.0f}" for item in phase.items)
            line += f" ({', '.join(items)})"
        yield line


def run_case(overrides: tuple[str, ...], folder: Path) -> dict[str, float]:
    """Run the ranks of one case; returns the largest value of each metric over ranks and steps."""
    num_ranks = 2 if "cluster.num_ranks_per_node=2" in overrides else 1
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        place = {
            "RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": 2 // num_ranks,
        }
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        command = [sys.executable, "-m", "benchmarks.sides.memory_rank", str(folder), *overrides]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    names = dict.fromkeys(name for answer in answers for name in answer)
    return {name: max(answer.get(name, 0.0) for answer in answers) for name in names}


if __name__ == "__main__":
    main()
