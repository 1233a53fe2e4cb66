"""Learning curves of runs that sample ahead: how many steps old rows may be, and what weighs them.

Default task, one engine of its own and one rank, a learning rate ten times that of the default
run: there the policy moves far enough within K steps that old rows matter. K = 0 is the synchronous
run. Prints a table in Markdown and draws the curves. A finished run is kept in
.cache/benchmarks/staleness, and is read from there the next time its command is given.

    OMP_NUM_THREADS=1 python -m benchmarks.staleness [KEY=VALUE ...] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.algorithms import Run, draw, read_run, starter_model, train
from benchmarks.figure_stamps import ROOT, digest_of
from hybridrl.atomic_io import atomic_write_text
from hybridrl.json_text import to_json_text

_AHEAD = (
    *("serving=own", "serving.num_devices_per_node=1"),
    "serving.models.policy.groups.main.num_devices=1",
    "algorithm.rollout_correction=importance",
)
_UNWEIGHED = "algorithm.rollout_correction_args.level=none"

SETTINGS: Mapping[str, Sequence[str]] = {
    "K = 0": (),
    "K = 1, weighed": (*_AHEAD, "trainer.max_staleness=1"),
    "K = 4, weighed": (*_AHEAD, "trainer.max_staleness=4"),
    "K = 4, unweighed": (*_AHEAD, "trainer.max_staleness=4", _UNWEIGHED),
}
"""Overrides of each curve, by its title."""

_OVERRIDES = (
    *("actor.optimizer.lr=3e-4", "trainer.num_steps=60"),
    *("eval.num_prompts=512", "eval.every_num_steps=15", "checkpoint.every_num_steps=0"),
    *("trainer.export_hf=false", "tracking.live=off", "tracking.trackers=[]"),
    "cluster.num_threads_per_rank=1",
)
_CACHE = ROOT / ".cache" / "benchmarks" / "staleness"
_PICTURE = ROOT / "docs" / "images" / "staleness.svg"
_METRICS = ("rollout/staleness_steps/mean", "policy/effective_sample_fraction")


@dataclass(frozen=True)
class Measured:
    """One finished run."""

    run: Run
    metrics: Mapping[str, float]
    """Means over all steps, of those of ``_METRICS`` that the run has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of finished runs")
    parser.add_argument("--picture", type=Path, default=_PICTURE, help="SVG to write")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    overrides = [*_OVERRIDES, *options.overrides]
    model = starter_model(overrides, options.cache)
    measured: dict[str, list[Measured]] = {title: [] for title in options.settings}
    for seed in options.seeds:
        for title in options.settings:
            words = [*overrides, *SETTINGS[title], f"seed={seed}"]
            given = [f"model.path={model}", "model.starter=null"]
            measured[title].append(measure_once(words, given, title, options.cache))
    print_table(measured)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    curves = {title: [one.run for one in runs] for title, runs in measured.items()}
    options.picture.write_text(draw(curves), encoding="utf-8")


def measure_once(words: Sequence[str], model: Sequence[str], title: str, cache: Path) -> Measured:
    """Return a run from the cache; without one, train it and keep it there."""
    command = " ".join(["python -m hybridrl.main", *words])
    kept = cache / f"{digest_of(command, ())}.json"
    if not kept.is_file():
        print(f"{title}: {command} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            run_dir = train([*words, *model], Path(scratch))
            record = {**asdict(read_run(run_dir)), "metrics": mean_metrics(run_dir)}
        atomic_write_text(kept, to_json_text({"command": command, **record}) + "\n")
    record = json.loads(kept.read_text(encoding="utf-8"))
    run = Run(record["steps"], record["accuracies"], record["minutes"])
    said = " ".join(f"{accuracy:.3f}" for accuracy in run.accuracies)
    print(f"{title}, {words[-1]}: {said}, {run.minutes:.1f} min", file=sys.stderr, flush=True)
    return Measured(run, record["metrics"])


def mean_metrics(run_dir: Path) -> dict[str, float]:
    """Average over the steps of a run."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    values = {name: [row[name] for row in rows if name in row] for name in _METRICS}
    return {name: fmean(column) for name, column in values.items() if column}


def print_table(measured: Mapping[str, Sequence[Measured]]) -> None:
    """Print what each setting came to."""
    num_seeds = len(next(iter(measured.values())))
    print(f"Held-out accuracy of greedy responses, {num_seeds} seed(s); age and effective samples")
    print("are means over all steps.\n")
    print("| rows | steps | before | final, mean | final, min to max ", end="")
    print("| age of a token, steps | effective samples |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for title, runs in measured.items():
        finals = [one.run.accuracies[-1] for one in runs]
        before = fmean(one.run.accuracies[0] for one in runs)
        metrics = " | ".join(_mean_of(runs, name) for name in _METRICS)
        print(
            f"| {title} | {runs[0].run.steps[-1]} | {before:.3f} | {fmean(finals):.3f} "
            f"| {min(finals):.3f} to {max(finals):.3f} | {metrics} |"
        )


def _mean_of(runs: Sequence[Measured], name: str) -> str:
    values = [one.metrics[name] for one in runs if name in one.metrics]
    return f"{fmean(values):.2f}" if values else ""


if __name__ == "__main__":
    main()
