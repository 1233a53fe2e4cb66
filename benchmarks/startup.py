"""Seconds from the command to the end of step 1, seen from outside the process.

The environment is installed and the starter model lies in the cache. Two kinds of runs alternate:
the default, which evaluates 128 prompts before its first step, and one without evaluation. What
happens when is read off the processes that appear and the files that are written, so nothing in
hybridrl is changed or slowed for the measurement.

    python -m benchmarks.startup [--runs 7] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from benchmarks.sides.measure import CACHE, ROOT, print_head, print_row

_LIMIT_S = 12.0
_TIMEOUT_S = 180.0
_POLL_S = 0.02
_KINDS = {"default": [], "without evaluation": ["eval.every_num_steps=0"]}
_EVENTS = (
    "run folder made: configuration checked",
    "Ray's first process",
    "worker has imported its role",
    "step 0 recorded: evaluated before training",
    "step 1 recorded",
    "command ended",
)

Run = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(_KINDS), default=list(_KINDS))
    parser.add_argument(
        "--models", type=Path, default=CACHE / "models", help="cache of starter models"
    )
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        # Makes the starter model if need be.
        watch(options.overrides, Path(folder) / "first", options.models)
        for number in range(options.runs):
            for kind in options.kinds:
                overrides = [*options.overrides, *_KINDS[kind]]
                run_dir = Path(folder) / f"{number}-{kind.replace(' ', '-')}"
                runs[kind].append(watch(overrides, run_dir, options.models))
    print_table(runs)


def watch(overrides: list[str], run_dir: Path, models: Path) -> Run:
    """Run one step and note, in seconds after the command, when each event was first seen."""
    words = ["trainer.num_steps=1", "trainer.export_hf=false", f"trainer.run_dir={run_dir}"]
    command = [sys.executable, "-m", "hybridrl.main", *words, "tracking.live=off", *overrides]
    environment = os.environ | {"HYBRIDRL_CACHE": str(models)}
    began = time.perf_counter()
    seen: Run = {}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        signs = dict(zip(_EVENTS, signs_of(process, run_dir), strict=True))
        while _EVENTS[-1] not in seen:
            for event, is_seen in signs.items():
                if event not in seen and is_seen():
                    seen[event] = time.perf_counter() - began
            if time.perf_counter() - began > _TIMEOUT_S:
                process.kill()
            time.sleep(_POLL_S)
        if process.wait():
            log.seek(0)
            raise SystemExit(f"the command failed:\n{log.read().decode(errors='replace')}")
    return seen


def signs_of(process: subprocess.Popen[bytes], run_dir: Path) -> Iterator[Callable[[], bool]]:
    """Yield, for each event in turn, a function that tells whether it has happened."""
    metrics = run_dir / "metrics.jsonl"
    yield metrics.exists
    yield lambda: any("gcs_server" in name for name in descendants(process.pid))
    yield lambda: any("ActorRolloutWorker" in name for name in descendants(process.pid))
    yield lambda: metrics.exists() and '"step": 0,' in metrics.read_text(encoding="utf-8")
    yield lambda: metrics.exists() and '"step": 1,' in metrics.read_text(encoding="utf-8")
    yield lambda: process.poll() is not None


def descendants(pid: int) -> Iterator[str]:
    try:
        for child in psutil.Process(pid).children(recursive=True):
            yield " ".join(child.cmdline()[:1])
    except psutil.NoSuchProcess:  # it ended while we looked
        return


def print_table(runs: dict[str, list[Run]]) -> None:
    """Print medians, with the range of the one that has a limit."""
    print_head("seconds after the command, median", *runs)
    for event in _EVENTS:
        found = [[run[event] for run in several if event in run] for several in runs.values()]
        print_row(event, *(f"{statistics.median(s):.1f}" if s else "" for s in found))
    for kind, several in runs.items():
        ends = [run["step 1 recorded"] for run in several]
        print(
            f"\n{kind}: {min(ends):.1f} to {max(ends):.1f} s to the end of step 1 over "
            f"{len(ends)} runs; limit {_LIMIT_S:.0f} s"
        )


if __name__ == "__main__":
    main()
