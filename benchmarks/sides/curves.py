"""Learning curves of several runs a setting: runs that are kept, and a picture."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from pathlib import Path
from statistics import mean

from benchmarks.sides.drawing import GREY, ORANGE, Frame, picture, words
from benchmarks.sides.measure import ROOT, read_metrics, train
from hybridrl import env
from hybridrl.atomic_io import atomic_write_text
from hybridrl.config.load import load_config
from hybridrl.json_text import to_json_text
from hybridrl.main import compose
from hybridrl.run.starter import starter_name, warmup_config

METRIC = "eval/reward/mean"
_NUM_COLUMNS, _WIDTH, _HEIGHT = 4, 200, 176


@dataclass(frozen=True)
class Run:
    """One finished run."""

    steps: Sequence[int]
    """At which the held-out prompts were answered."""

    accuracies: Sequence[float]
    """Share of right answers among them, greedy."""

    minutes: float
    """From the first step to the last, evaluations included."""

    effective: float | None = None
    """Share of the tokens that would estimate as well unweighed: mean of the second half."""


Curves = Mapping[str, Sequence[Run]]
"""Runs of each setting by its title, one a seed."""


def starter_model(overrides: Sequence[str], cache: Path) -> Path:
    """Return the folder of the starter model of seed 0; an evaluation makes it if need be."""
    cache.mkdir(parents=True, exist_ok=True)
    config = load_config(compose([*overrides, "trainer.run_dir=unused"]))
    if config.model.starter is None:
        raise SystemExit("the overrides name a model; give them without model.path")
    folder = env.cache_dir() / starter_name(warmup_config(config, config.model.starter))
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            train([*overrides, "mode=eval"], Path(scratch))
    return folder


def kept(title: str, words: Sequence[str], cache: Path, measure: Callable[[], Run]) -> Run:
    """Return a run of these words and this commit from the cache; without one, measure it."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    name = hashlib.sha256(f"{commit} {' '.join(words)}".encode()).hexdigest()[:16]
    file = cache / f"{re.sub(r'[^A-Za-z0-9]+', '-', title)}-{name}.json"
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"{' '.join(words)} ...", file=sys.stderr, flush=True)
        atomic_write_text(file, to_json_text(asdict(measure())) + "\n")
    run = Run(**json.loads(file.read_text(encoding="utf-8")))
    said = " ".join(f"{accuracy:.3f}" for accuracy in run.accuracies)
    print(f"{title}, {words[-1]}: {said}, {run.minutes:.1f} min", file=sys.stderr, flush=True)
    return run


def read_run(run_dir: Path) -> Run:
    """Read the evaluations of a run folder."""
    rows = read_metrics(run_dir)
    return run_of(rows, minutes=(rows[-1]["elapsed_s"] - rows[0]["elapsed_s"]) / 60)


def run_of(rows: Sequence[Mapping[str, float]], *, minutes: float) -> Run:
    """Read the metrics of all steps."""
    evaluated = [row for row in rows if METRIC in row]
    name = "policy/effective_sample_fraction"
    shares = [row[name] for row in rows if name in row]
    return Run(
        [round(row["step"]) for row in evaluated],
        [row[METRIC] for row in evaluated],
        minutes,
        mean(shares[len(shares) // 2 :]) if shares else None,
    )


def write_picture(path: Path, curves: Curves) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(curves), encoding="utf-8")


def draw(curves: Curves) -> str:
    """Return an SVG with a panel a setting: mean over seeds, a band from the lowest to the highest.

    The first setting is drawn into every panel as a thin line.
    """
    frame = _frame_of(curves)
    tenths = range(round(10 * frame.low), round(10 * frame.high) + 1)
    reference = frame.curve(mean_curve(next(iter(curves.values()))), GREY, width=1.2)
    panels = []
    for index, (title, runs) in enumerate(curves.items()):
        row, column = divmod(index, _NUM_COLUMNS)
        columns = list(zip(*(run.accuracies for run in runs), strict=True))
        high, low = (list(zip(runs[0].steps, map(end, columns), strict=True)) for end in (max, min))
        panels += [
            f'<g transform="translate({column * _WIDTH},{row * _HEIGHT})">',
            words(frame.left + 6, frame.top - 10, title),
            *frame.axes([n / 10 for n in tenths], [(x, f"{x}") for x in (0, frame.last_x)]),
            reference,
            frame.area([*high, *reversed(low)], ORANGE),
            frame.curve(mean_curve(runs), ORANGE, width=2.2),
            "</g>",
        ]
    width = min(_NUM_COLUMNS, len(curves)) * _WIDTH + 4
    return picture(width, -(-len(curves) // _NUM_COLUMNS) * _HEIGHT, panels)


def _frame_of(curves: Curves) -> Frame:
    """Fit a panel around all runs: its height is in tenths."""
    every = [run for runs in curves.values() for run in runs]
    accuracies = [accuracy for run in every for accuracy in run.accuracies]
    low = floor(10 * min(accuracies))
    high = max(low + 1, ceil(10 * max(accuracies)))
    last_step = max(run.steps[-1] for run in every)
    sides = {"width": _WIDTH, "height": _HEIGHT, "left": 34, "right": 12, "top": 30, "bottom": 26}
    return Frame(last_x=last_step, low=low / 10, high=high / 10, **sides)


def mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return each evaluated step, and the mean accuracy over the seeds."""
    columns = zip(*(run.accuracies for run in runs), strict=True)
    return list(zip(runs[0].steps, map(mean, columns), strict=True))
