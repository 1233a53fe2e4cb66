"""Seconds to make the report of a run of 10,000 steps, and bytes of its page. Limit 5 s.

python -m benchmarks.report [--steps 10000] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import yaml

from benchmarks.sides.measure import print_head, print_row, seconds_of
from hybridrl.main import compose
from hybridrl.metrics import DECLARATIONS

_LIMIT_S = 5.0
_NUM_RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="write the run folder here, and keep it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="report-") as scratch:
        folder = options.keep or Path(scratch) / "run"
        write_run(folder, num_steps=options.steps)
        command = [sys.executable, "-m", "hybridrl.report", str(folder)]
        make = partial(subprocess.run, command, check=True, capture_output=True)
        seconds = [seconds_of(make) for _ in range(_NUM_RUNS)]
        print_head("file", "MB")
        for path in sorted(folder.iterdir()):
            print_row(path.name, f"{path.stat().st_size / 1e6:.1f}")
    print(
        f"\n{options.steps} steps, the whole command: median {statistics.median(seconds):.2f} s, "
        f"{min(seconds):.2f} to {max(seconds):.2f} over {_NUM_RUNS} (limit {_LIMIT_S:.0f} s)"
    )


def write_run(folder: Path, *, num_steps: int) -> None:
    """Write a run folder in which every declared metric was logged at every step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(compose([f"trainer.num_steps={num_steps}", "seed=1"]))
    )
    (folder / "log.txt").write_text("")
    names = [name.replace("{stage}", "update").replace("{source}", "a") for name in DECLARATIONS]
    chance = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            level = 1 - math.exp(-step / num_steps * 3)
            line = {"step": step, "elapsed_s": 0.5 * step}
            file.write(json.dumps(line | {n: level + chance.random() / 5 for n in names}) + "\n")
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            for prompt in range(4):
                file.write(json.dumps(_sample(step, prompt, "train")) + "\n")
                if step % 20 == 0:
                    file.write(json.dumps(_sample(step, prompt, "eval")) + "\n")


def _sample(step: int, prompt: int, split: str) -> dict[str, object]:
    tokens = [f" word{number}" for number in range(100)]
    return {
        "step": step,
        "prompt": f"Question {prompt}?",
        "response": "".join(tokens),
        "answer": "42",
        "reward": 0.5,
        "is_truncated": False,
        "split": split,
        "tokens": tokens,
        "logprobs": [-round((step + n) % 7 / 7, 3) for n in range(100)],
    }


if __name__ == "__main__":
    main()
