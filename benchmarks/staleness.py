"""Learning curves of rows that are K steps old when the run learns from them, by their correction.

The default task, model and learning rate (3e-5), and the same at 1e-4, where the policy moves
further in a step; at 3e-4 even K = 0 learns nothing. Engine and trainer take turns in one process
(``benchmarks/sides/ahead_in_turns.py``), so that every row has its age exactly. Prints a table in
Markdown and draws the curves. A finished run is kept in .cache/benchmarks/staleness, and is read
from there the next time.

    OMP_NUM_THREADS=1 python -m benchmarks.staleness [KEY=VALUE ...] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.algorithms import Run, draw, name_of, starter_model
from benchmarks.publish import ROOT
from benchmarks.sides.ahead_in_turns import train_in_turns
from hybridrl.atomic_io import atomic_write_text
from hybridrl.json_text import to_json_text

_WEIGHED = ("algorithm.rollout_correction=importance",)
_NOTHING = (*_WEIGHED, "algorithm.rollout_correction_args.level=none")
_CLIPPED = ("algorithm.old_logprobs=sampler",)
_MASKED = ("algorithm.token_mask=off_policy_mask",)
_FAST = ("actor.optimizer.lr=1e-4", "trainer.num_steps=60", "eval.every_num_steps=10")

SETTINGS: Mapping[str, tuple[int, Sequence[str]]] = {
    "K = 0": (0, ()),
    "K = 1, clipped": (1, _CLIPPED),
    "K = 4, clipped": (4, _CLIPPED),
    "K = 4, uncorrected": (4, _NOTHING),
    "1e-4: K = 0": (0, _FAST),
    "1e-4: K = 4, clipped": (4, (*_FAST, *_CLIPPED)),
    "1e-4: K = 4, token weights": (4, (*_FAST, *_WEIGHED)),
    "1e-4: K = 4, uncorrected": (4, (*_FAST, *_NOTHING)),
}
"""K and overrides of each curve, by its title.

``clipped``: PPO's clip around the policy that sampled; ``token weights``: truncated at 2.
"""

OTHERS: Mapping[str, tuple[int, Sequence[str]]] = {
    "K = 4, token weights": (4, _WEIGHED),
    "K = 4, masked": (4, _MASKED),
    "1e-4: K = 1, clipped": (1, (*_FAST, *_CLIPPED)),
    "1e-4: K = 1, uncorrected": (1, (*_FAST, *_NOTHING)),
    "1e-4: K = 4, masked": (4, (*_FAST, *_MASKED)),
    "1e-4: K = 4, weights, masked": (4, (*_FAST, *_WEIGHED, *_MASKED)),
}
"""Curves to ask for; ``masked``: bad responses that the policy has left behind are left out."""

_OVERRIDES = (
    *("eval.num_prompts=512", "eval.every_num_steps=20", "checkpoint.every_num_steps=0"),
    *("tracking.num_samples_per_step=0", "cluster.num_threads_per_rank=1"),
)

_CACHE = ROOT / ".cache" / "benchmarks" / "staleness"
_PICTURE = ROOT / "docs" / "images" / "staleness.svg"
_ALL = {**SETTINGS, **OTHERS}
_EFFECTIVE = "policy/effective_sample_fraction"


@dataclass(frozen=True)
class Measured:
    """One finished run."""

    run: Run
    effective: float | None
    """Share of the tokens that would estimate as well unweighed: mean of the second half."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=_ALL)
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
            words = [*overrides, *_ALL[title][1], f"seed={seed}"]
            measured[title].append(measure_once(title, words, model, options.cache))
    print_table(measured)
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    curves = {title: [one.run for one in runs] for title, runs in measured.items()}
    options.picture.write_text(draw(curves), encoding="utf-8")


def measure_once(title: str, words: Sequence[str], model: Path, cache: Path) -> Measured:
    """Return a run from the cache; without one, train it and keep it there."""
    begin = time.perf_counter()
    command = " ".join([title, *words])
    kept = cache / f"{name_of(command)}.json"
    if not kept.is_file():
        rows = train_in_turns(words, model, _ALL[title][0]).rows
        minutes = (time.perf_counter() - begin) / 60
        measured = asdict(read_rows(rows, minutes))
        atomic_write_text(kept, to_json_text({"command": command, **measured}) + "\n")
    record = json.loads(kept.read_text(encoding="utf-8"))
    run = Run(**record["run"])
    said = " ".join(f"{accuracy:.3f}" for accuracy in run.accuracies)
    print(f"{title}, {words[-1]}: {said}, {run.minutes:.1f} min", file=sys.stderr, flush=True)
    return Measured(run, record["effective"])


def read_rows(rows: Sequence[Mapping[str, float]], minutes: float) -> Measured:
    """Read the metrics of all steps."""
    evaluated = [row for row in rows if "eval/reward/mean" in row]
    steps = [int(row["step"]) for row in evaluated]
    shares = [row[_EFFECTIVE] for row in rows if _EFFECTIVE in row]
    run = Run(steps, [row["eval/reward/mean"] for row in evaluated], minutes)
    return Measured(run, fmean(shares[len(shares) // 2 :]) if shares else None)


def print_table(measured: Mapping[str, Sequence[Measured]]) -> None:
    """Print what each setting came to."""
    num_seeds = len(next(iter(measured.values())))
    print(f"Held-out accuracy of greedy responses, {num_seeds} seed(s).\n")
    print("| rows | steps | before | halfway, mean | final, mean | final, min to max ", end="")
    print("| best | effective samples, second half |")
    print("|---|" + "---:|" * 7)
    for title, runs in measured.items():
        columns = list(zip(*(one.run.accuracies for one in runs), strict=True))
        final, best = columns[-1], max(max(one.run.accuracies) for one in runs)
        shares = [one.effective for one in runs if one.effective is not None]
        effective = f"{fmean(shares):.2f}" if shares else ""
        print(
            f"| {title} | {runs[0].run.steps[-1]} | {fmean(columns[0]):.3f} "
            f"| {fmean(columns[len(columns) // 2]):.3f} | {fmean(final):.3f} "
            f"| {min(final):.3f} to {max(final):.3f} | {best:.3f} | {effective} |"
        )


if __name__ == "__main__":
    main()
