"""Learning curves of algorithms on the default task: three seeds each, from one starter model.

Prints a table in Markdown and draws the curves. The held-out prompts are 512 where a default run
has 128, so that chance moves an accuracy by .02 instead of .04. A finished run is kept in
.cache/benchmarks/algorithms, and is read from there by the same command at the same commit.
A benchmark that was interrupted goes on with the run that it was at.

    python -m benchmarks.algorithms [KEY=VALUE ...] [--recipes algorithms/gspo ...] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from pathlib import Path
from statistics import mean

from benchmarks.publish import ROOT
from hybridrl import env
from hybridrl.atomic_io import atomic_write_text
from hybridrl.config.load import load_config
from hybridrl.json_text import to_json_text
from hybridrl.main import compose
from hybridrl.run.starter import starter_name, warmup_config

RECIPES = {
    "none": "GRPO",
    "algorithms/dr_grpo": "Dr. GRPO",
    "algorithms/ppo": "PPO",
    "algorithms/dapo": "DAPO",
    "algorithms/rloo": "RLOO",
    "algorithms/reinforce_plus_plus": "REINFORCE++",
    "algorithms/gspo": "GSPO",
    "algorithms/cispo": "CISPO",
}
"""Recipes that are measured by default, with their titles; ``none`` is the default experiment."""

_OVERRIDES = (
    *("eval.num_prompts=512", "eval.every_num_steps=10", "checkpoint.every_num_steps=0"),
    *("trainer.export_hf=false", "tracking.live=off", "tracking.trackers=[]"),
)
_CACHE = ROOT / ".cache" / "benchmarks" / "algorithms"
_PICTURE = ROOT / "docs" / "images" / "algorithms.svg"
_METRIC = "eval/reward/mean"

_NUM_COLUMNS, _WIDTH, _HEIGHT, _LEFT, _TOP = 4, 200, 176, 34, 30
_CURVE, _OTHER, _TEXT, _GRID = "#d9480f", "#8c959f", "#57606a", "#d0d7de"


@dataclass(frozen=True)
class Run:
    """One finished run."""

    steps: Sequence[int]
    """At which the held-out prompts were answered."""

    accuracies: Sequence[float]
    """Share of right answers among them, greedy."""

    minutes: float
    """From the first step to the last, evaluations included."""


Curves = Mapping[str, Sequence[Run]]
"""Runs of each recipe, one a seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of finished runs")
    parser.add_argument("--picture", type=Path, default=_PICTURE, help="SVG to write")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    overrides = [*_OVERRIDES, *options.overrides]
    curves: dict[str, list[Run]] = {recipe: [] for recipe in options.recipes}
    model = starter_model(overrides, options.cache)
    for seed in options.seeds:
        for recipe in options.recipes:
            words = [f"recipes={recipe}", *overrides, f"model.path={model}", "model.starter=null"]
            curves[recipe].append(run_once([*words, f"seed={seed}"], recipe, options.cache))
    print_table(curves, num_seeds=len(options.seeds))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(draw(curves), encoding="utf-8")


def starter_model(overrides: Sequence[str], cache: Path) -> Path:
    """Return the folder of the starter model of seed 0; an evaluation makes it if need be."""
    config = load_config(compose([*overrides, "trainer.run_dir=unused"]))
    if config.model.starter is None:
        raise SystemExit("the overrides name a model; give them without model.path")
    folder = env.cache_dir() / starter_name(warmup_config(config, config.model.starter))
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            train([*overrides, "mode=eval"], Path(scratch))
    return folder


def run_once(words: Sequence[str], recipe: str, cache: Path) -> Run:
    """Return a run from the cache; without one, train it and keep it there."""
    command = " ".join(["python -m hybridrl.main", *words])
    kept = cache / f"{Path(recipe).name}-{name_of(command)}.json"
    if not kept.is_file():
        print(f"{command} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            run = read_run(train(words, Path(scratch)))
        atomic_write_text(kept, to_json_text({"command": command, **asdict(run)}) + "\n")
    record = json.loads(kept.read_text(encoding="utf-8"))
    run = Run(record["steps"], record["accuracies"], record["minutes"])
    said = " ".join(f"{accuracy:.3f}" for accuracy in run.accuracies)
    print(f"{words[-1]} {recipe}: {said}, {run.minutes:.1f} min", file=sys.stderr, flush=True)
    return run


def name_of(command: str) -> str:
    """Name a kept run by its command and the commit."""
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return hashlib.sha256(f"{commit} {command}".encode()).hexdigest()[:16]


def train(words: Sequence[str], scratch: Path) -> Path:
    """Give the command that a user would give; returns its run folder.

    Raises:
        SystemExit: it failed; with its last lines.
    """
    run_dir = scratch / "run"
    command = [sys.executable, "-m", "hybridrl.main", *words, f"trainer.run_dir={run_dir}"]
    environment = os.environ | {"PYTHONPATH": env.python_path()}
    done = subprocess.run(
        command,
        check=False,
        env=environment,
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


def read_run(run_dir: Path) -> Run:
    """Read the evaluations of a run folder."""
    rows = read_metrics(run_dir)
    evaluated = [row for row in rows if _METRIC in row]
    minutes = (rows[-1]["elapsed_s"] - rows[0]["elapsed_s"]) / 60
    return Run(
        [round(row["step"]) for row in evaluated], [row[_METRIC] for row in evaluated], minutes
    )


def print_table(curves: Curves, *, num_seeds: int) -> None:
    """Print what each recipe came to."""
    print(f"Held-out accuracy of greedy responses, {num_seeds} seed(s); minutes are those of the")
    print("quickest run, from its first step to its last.\n")
    print("| recipe | steps | before | final, mean | final, min to max | best | minutes |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for recipe, runs in curves.items():
        finals = [run.accuracies[-1] for run in runs]
        before = mean(run.accuracies[0] for run in runs)
        best = max(max(run.accuracies) for run in runs)
        spread = f"{min(finals):.3f} to {max(finals):.3f}"
        minutes = min(run.minutes for run in runs)
        print(
            f"| {RECIPES.get(recipe, recipe)} | {runs[0].steps[-1]} | {before:.3f} | "
            f"{mean(finals):.3f} | {spread} | {best:.3f} | {minutes:.1f} |"
        )


def draw(curves: Curves) -> str:
    """Return an SVG with a panel a recipe: mean over seeds, a band from the lowest to the highest.

    The first recipe is drawn into every panel as a thin line.
    """
    scale = Scale.of(curves)
    reference = polyline(mean_curve(next(iter(curves.values()))), scale, _OTHER, width=1.2)
    panels = []
    for index, (recipe, runs) in enumerate(curves.items()):
        row, column = divmod(index, _NUM_COLUMNS)
        title = label(_LEFT + 6, _TOP - 10, RECIPES.get(recipe, recipe), weight="bold")
        curve = polyline(mean_curve(runs), scale, _CURVE, width=2.2)
        panel = [title, *axes(scale), reference, band(runs, scale), curve]
        at = f"translate({column * _WIDTH},{row * _HEIGHT})"
        panels.append(f'<g transform="{at}">\n' + "\n".join(panel) + "\n</g>")
    width = min(_NUM_COLUMNS, len(curves)) * _WIDTH + 4
    height = -(-len(curves) // _NUM_COLUMNS) * _HEIGHT
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([head, background, *panels, "</svg>"]) + "\n"


@dataclass(frozen=True)
class Scale:
    """Axes that all panels share."""

    last_step: int
    low: int
    """Lowest accuracy of the axis, in tenths."""

    high: int
    """Highest accuracy of the axis, in tenths."""

    @classmethod
    def of(cls, curves: Curves) -> Scale:
        """Fit the axes around all runs."""
        every = [run for runs in curves.values() for run in runs]
        accuracies = [accuracy for run in every for accuracy in run.accuracies]
        low = floor(10 * min(accuracies))
        high = max(low + 1, ceil(10 * max(accuracies)))
        return cls(max(run.steps[-1] for run in every), low, high)

    def pixel(self, step: float, accuracy: float) -> str:
        """Place a point in a panel."""
        x = _LEFT + step / self.last_step * (_WIDTH - _LEFT - 12)
        share = (10 * accuracy - self.low) / (self.high - self.low)
        return f"{x:.1f},{_TOP + (1 - share) * (_HEIGHT - _TOP - 26):.1f}"


def columns_of(runs: Sequence[Run]) -> list[tuple[float, ...]]:
    """Return the accuracies of all seeds at each evaluated step."""
    return list(zip(*(run.accuracies for run in runs), strict=True))


def mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    """Return each evaluated step, and the mean accuracy over the seeds."""
    return list(zip(runs[0].steps, map(mean, columns_of(runs)), strict=True))


def band(runs: Sequence[Run], scale: Scale) -> str:
    columns = columns_of(runs)
    high, low = (
        [scale.pixel(*point) for point in zip(runs[0].steps, map(bound, columns), strict=True)]
        for bound in (max, min)
    )
    points = " ".join([*high, *reversed(low)])
    return f'<polygon fill="{_CURVE}" fill-opacity="0.25" points="{points}"/>'


def polyline(
    points: Sequence[tuple[float, float]], scale: Scale, color: str, *, width: float
) -> str:
    pixels = " ".join(scale.pixel(*point) for point in points)
    return f'<polyline fill="none" stroke="{color}" stroke-width="{width}" points="{pixels}"/>'


def axes(scale: Scale) -> Iterator[str]:
    for tenths in range(scale.low, scale.high + 1):
        ends = [(0, tenths / 10), (scale.last_step, tenths / 10)]
        yield polyline(ends, scale, _GRID, width=1)
        y = float(scale.pixel(*ends[0]).partition(",")[2])
        yield label(_LEFT - 6, y + 4, f"{tenths / 10:.1f}", anchor="end")
    for step in (0, scale.last_step):
        x = float(scale.pixel(step, 0.0).partition(",")[0])
        yield label(x, _HEIGHT - 10, str(step), anchor="middle")


def label(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{_TEXT}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


if __name__ == "__main__":
    main()
