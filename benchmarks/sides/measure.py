"""What benchmarks do alike: they time ways in turn, train runs, and print tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hybridrl import env

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "benchmarks"


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds by the clock that it takes."""
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    del result  # gives its memory back before the next one needs it
    return seconds


def in_turns(
    ways: Mapping[str, Callable[[], object]], num_rounds: int, *, num_warmup: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each way; a round does each once, so that a busy machine slows all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_warmup + num_rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seconds[name].append(seconds_of(ways[name]))
    return {name: several[num_warmup:] for name, several in seconds.items()}


def print_head(*columns: str, num_texts: int = 1) -> None:
    """Print the head of a Markdown table whose first columns are text, and the others numbers."""
    print_row(*columns)
    print("|---" * num_texts + "|---:" * (len(columns) - num_texts) + "|", flush=True)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def train(words: Sequence[str], scratch: Path) -> Path:
    """Give the command that a user would give; returns its run folder.

    Raises:
        SystemExit: it failed; with its last lines.
    """
    run_dir = scratch / "run"
    command = [sys.executable, "-m", "hybridrl.main", *words, f"trainer.run_dir={run_dir}"]
    done = subprocess.run(
        command,
        check=False,
        env=os.environ | {"PYTHONPATH": env.python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")
    return run_dir


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Read the metrics of each step of a run folder."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
