"""Conversations on two SGLang servers: the manager chooses the engine, or sglang-router does.

Both train recipes=cpu/calculator in turns, run for run, from the same starter model.
Later turns hit the cache of the engine that has their beginning; a row has the medians of steps.

    python -m benchmarks.router [--steps 8] [--rounds 2] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.sides.measure import print_head, print_row, read_metrics, train

_ROUTERS = {"the manager": "none", "sglang-router": "sglang"}
_METRICS = (
    *("rollout/prefix_cache_hit_fraction", "agent/turns/mean"),
    *("time/generate_s", "throughput/response_tokens_per_s"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="of a run, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in _ROUTERS}
    for _ in range(options.rounds):
        for name, router in _ROUTERS.items():
            words = [f"serving.router={router}", *options.overrides]
            with tempfile.TemporaryDirectory(prefix="router-") as folder:
                steps[name] += run(Path(folder), words, num_steps=options.steps + 1)[1:]
    print_head(
        *("who chooses", "cached share of prompt tokens", "turns", "generate, s", "tokens/s")
    )
    for name, measured in steps.items():
        hits, turns, seconds, speed = (median(s[metric] for s in measured) for metric in _METRICS)
        print_row(name, f"{hits:.3f}", f"{turns:.2f}", f"{seconds:.2f}", f"{speed:.0f}")


def run(folder: Path, words: list[str], *, num_steps: int) -> list[dict[str, float]]:
    command = [
        *("recipes=cpu/calculator", "rollout=sglang", "serving=own", "tracking.live=off"),
        *("eval.every_num_steps=0", "checkpoint.every_num_steps=0", "rollout.start_timeout_s=150"),
        *("cluster.start_timeout_s=160", f"trainer.num_steps={num_steps}", *words),
    ]
    return [step for step in read_metrics(train(command, folder)) if "loss/policy" in step]


if __name__ == "__main__":
    main()
