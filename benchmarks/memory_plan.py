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
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from hybridrl.config.load import read_config
from hybridrl.main import compose
from hybridrl.planning.plan import MemoryPlan, Phase
from hybridrl.rehearsal.plan import plan_by_execution

MIB = 2**20
_UNMEASURED = ("Python, torch, Ray", "checkpoint")
NO_HEAP = {"MALLOC_MMAP_THRESHOLD_": "131072"}
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
TWO_RANKS = ("cluster.num_ranks_per_node=2", "cluster.num_threads_per_rank=1")


def _tokens(number: int) -> tuple[str, ...]:
    return (f"actor.max_tokens_per_microbatch={number}",)


CRITIC = ("critic.num_minibatches=1",)
LONG = _rows(64, 192, prompts=8)
CASES = {
    "default": _shape(SMALL),
    "default, long rows": (*_shape(SMALL), *LONG, *_tokens(8192)),
    "default, long rows, checkpointing": (*_shape(SMALL), *LONG, *CHECKPOINTING),
    "middle": (*_shape(MIDDLE), *LONG, *_tokens(4096)),
    "middle, sleep": (*_shape(MIDDLE), *LONG, *_tokens(4096), *SLEEP),
    "middle, two ranks": (*_shape(MIDDLE), *LONG, *_tokens(4096), *TWO_RANKS),
    "middle, PPO": ("algorithm=ppo", *_shape(MIDDLE), *LONG, *_tokens(4096), *CRITIC),
    "large": (*_shape(LARGE), *LONG, *_tokens(2048)),
    "large, checkpointing": (*_shape(LARGE), *LONG, *_tokens(8192), *CHECKPOINTING),
    "large, LoRA": ("lora=default", *_shape(LARGE), *LONG, *_tokens(2048)),
    "wide, vocabulary of 32768": (
        *_shape(WIDE, 32768),
        *LONG,
        *_tokens(2048),
        "actor.logprob_chunk_tokens=512",
    ),
    "lora_cpu": ("recipes=cpu/lora", *_shape(SMALL)),
    "ppo_cpu": ("recipes=algorithms/ppo", *_shape(SMALL)),
}

PUBLISHED = (
    *("default", "default, long rows, checkpointing", "middle, sleep", "middle, two ranks"),
    *("large", "large, LoRA", "ppo_cpu"),
)
"""One of each kind, in some five minutes."""


def main() -> None:
    """Run the cases named on the command line, or those of the table; print it."""
    print("| case | phase | predicted MiB | without malloc's heap | with it |")
    print("|---|---|---:|---:|---:|", flush=True)
    for name in sys.argv[1:] or PUBLISHED:
        overrides = CASES[name]
        without_heap, with_heap = run_case(overrides, NO_HEAP), run_case(overrides, {})
        plan = plan_of(overrides)
        phase = max(plan.phases, key=_measured_bytes)
        predicted = _measured_bytes(phase)
        cells = [name, phase.name, f"{predicted / MIB:.0f}"]
        for measured in (without_heap, with_heap):
            peak = measured[f"memory/{phase.name}_peak_bytes/max"]
            cells.append(f"{peak / MIB:.0f} ({peak / predicted - 1:+.0%})")
        print(f"| {' | '.join(cells)} |", flush=True)


def plan_of(overrides: tuple[str, ...]) -> MemoryPlan:
    """Execute a case on fake devices."""
    config, _ = read_config(compose(overrides))
    if config is None:
        raise ValueError(f"a case cannot be read: {overrides}")
    return plan_by_execution(config)


def _measured_bytes(phase: Phase) -> int:
    """Return what the meter of a run counts: not the process before, nor a copy that is written."""
    return sum(item.num_bytes for item in phase.items if item.name not in _UNMEASURED)


def run_case(overrides: tuple[str, ...], variables: Mapping[str, str]) -> dict[str, float]:
    """Run the ranks of one case; returns the largest value of each metric over the ranks."""
    num_ranks = 2 if "cluster.num_ranks_per_node=2" in overrides else 1
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    group = {
        "WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": 2 // num_ranks,
    }
    shared = {**os.environ, **{name: str(value) for name, value in group.items()}, **variables}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sides.memory_rank", folder, *overrides]
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


if __name__ == "__main__":
    main()
