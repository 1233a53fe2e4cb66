"""Training while engines sample: real runs with K = 0, 1 and 4.

The default task with numbers whose lengths have a heavy tail, one engine of its own and one process
that trains, on the two cores of this machine. With ``--folder`` finished runs are kept, and read
from there the next time.

    OMP_NUM_THREADS=1 python -m benchmarks.asynchronous [--picture docs/images/asynchronous.svg]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sides.drawing import COLORS, Frame, picture, words
from benchmarks.sides.measure import print_head, print_row, read_metrics, train
from hybridrl.data.tasks import Split, build_sort_digits_rows

_NUM_FIRST = 2
"""Steps at the begin of a run that are not measured: imports and allocations."""

_NUM_PROMPTS, _NUM_RESPONSES = 16, 8
_MIN_DIGITS, _MAX_DIGITS = 2, 100
_MEDIAN_DIGITS, _SIGMA = 8, 0.9
_MAX_TOKENS = _MAX_DIGITS + 1
_NUM_ROWS: Mapping[Split, int] = {"train": 4000, "eval": 256}

_OVERRIDES = (
    *("serving=own", "serving.num_devices_per_node=1", "cluster.num_threads_per_rank=1"),
    "serving.models.policy.groups.main.num_devices=1",
    "algorithm.rollout_correction=importance",
    *("data=files", "data.use_chat_template=false", f"data.max_prompt_tokens={_MAX_TOKENS}"),
    f"rollout.num_slots={_NUM_PROMPTS * _NUM_RESPONSES}",
    *(f"trainer.num_prompts_per_step={_NUM_PROMPTS}", f"rollout.max_response_tokens={_MAX_TOKENS}"),
    *(f"rollout.num_responses_per_prompt={_NUM_RESPONSES}", "trainer.overwrite=true"),
    *("eval.every_num_steps=10", f"eval.num_prompts={_NUM_ROWS['eval']}"),
    *("checkpoint.every_num_steps=0", "trainer.export_hf=false", "tracking.live=off"),
    "tracking.trackers=[]",
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Steps of a run folder, from step 1."""

    steps: Sequence[dict[str, float]]
    """Metrics of each step."""

    accuracies: Sequence[tuple[float, float]]
    """Seconds of training, and held-out accuracy then."""

    @property
    def steps_per_hour(self) -> float:
        """Of all steps but the first ones; evaluations do not count."""
        seconds = [one["time/step_s"] for one in self.steps[_NUM_FIRST:]]
        return 3600 * len(seconds) / sum(seconds)

    def mean(self, metric: str) -> float | None:
        values = [one[metric] for one in self.steps[_NUM_FIRST:] if metric in one]
        return sum(values) / len(values) if values else None

    def accuracy_at(self, seconds: float) -> float:
        """Interpolate the held-out accuracy after so many seconds of training."""
        before = [point for point in self.accuracies if point[0] <= seconds]
        after = [point for point in self.accuracies if point[0] > seconds]
        if not before or not after:
            return (before[-1] if before else after[0])[1]
        (left_s, left), (right_s, right) = before[-1], after[0]
        return left + (right - left) * (seconds - left_s) / (right_s - left_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 4], metavar="K")
    parser.add_argument("--folder", type=Path, help="of finished runs; a temporary one")
    parser.add_argument("--picture", type=Path, help="SVG of the learning curves to write")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asynchronous-") as scratch:
        folder = options.folder or Path(scratch)
        folders = {
            k: train_once(k, folder, num_steps=options.steps, overrides=options.overrides)
            for k in options.staleness
        }
        runs = {k: read_run(one) for k, one in folders.items()}
    print_runs(runs)
    if options.picture is not None:
        options.picture.write_text(draw(runs), encoding="utf-8")


def train_once(
    max_staleness: int, folder: Path, *, num_steps: int, overrides: Sequence[str]
) -> Path:
    """Train, and return the run folder; a run that is in the folder is not repeated."""
    run_dir = folder / f"k{max_staleness}-{num_steps}" / "run"
    if (run_dir / "report.html").is_file():  # the end of a run writes it
        return run_dir
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    files = [f"data.{split}_files=[{write_rows(split, folder)}]" for split in _NUM_ROWS]
    steps = [f"trainer.num_steps={num_steps}", f"trainer.max_staleness={max_staleness}"]
    return train([*_OVERRIDES, *files, *steps, *overrides], run_dir.parent)


def write_rows(split: Split, folder: Path) -> Path:
    """Write rows of lognormal lengths: the 99th of 100 has eight times the median."""
    source = random.Random(split)
    lines = []
    for index in range(_NUM_ROWS[split]):
        drawn = round(_MEDIAN_DIGITS * math.exp(_SIGMA * source.gauss(0.0, 1.0)))
        digits = min(max(drawn, _MIN_DIGITS), _MAX_DIGITS)
        (row,) = build_sort_digits_rows(
            1, split=split, seed=index, min_digits=digits, max_digits=digits
        )
        lines.append(json.dumps({"prompt": row.prompt, "answer": row.answer}))
    path = folder / f"{split}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read_run(run_dir: Path) -> MeasuredRun:
    """Read ``metrics.jsonl``. Seconds of training are those of steps, without evaluations."""
    rows = read_metrics(run_dir)
    seconds, accuracies = 0.0, []
    for row in rows:
        seconds += row.get("time/step_s", 0.0)
        if "eval/reward/mean" in row:
            accuracies.append((seconds, row["eval/reward/mean"]))
    return MeasuredRun(steps=[row for row in rows if row["step"]], accuracies=accuracies)


def print_runs(runs: Mapping[int, MeasuredRun]) -> None:
    equal_s = min(run.accuracies[-1][0] for run in runs.values())
    first = next(iter(runs.values()))
    print(f"Real runs of {len(first.steps)} steps; accuracy after {equal_s:.0f} s of training:\n")
    print_head(
        *("K", "steps/h", "gain", "trainer waits, s a step", "engines idle, s a step"),
        *("update of engines, s", "staleness, mean", "accuracy"),
        num_texts=0,
    )
    names = ("time/wait_for_groups_s", "time/engines_idle_s", "time/update_engines_s")
    for max_staleness, run in runs.items():
        means = [run.mean(name) for name in (*names, "rollout/staleness_steps/mean")]
        rate = run.steps_per_hour
        print_row(
            *(max_staleness, f"{rate:,.0f}", f"{rate / first.steps_per_hour:.2f}"),
            *("" if value is None else f"{value:.2f}" for value in means),
            f"{run.accuracy_at(equal_s):.3f}",
        )


def draw(runs: Mapping[int, MeasuredRun]) -> str:
    """Return an SVG of held-out accuracy over seconds of training, a curve for each K."""
    frame = Frame(last_x=max(run.accuracies[-1][0] for run in runs.values()))
    marks = [frame.last_x * fifth / 5 for fifth in range(6)]
    parts = [*frame.axes([n / 10 for n in range(0, 11, 2)], [(x, f"{x:.0f} s") for x in marks])]
    for place, (max_staleness, run) in enumerate(runs.items()):
        color = COLORS[place % len(COLORS)]
        parts.append(frame.curve(run.accuracies, color))
        parts.append(words(58 + 80 * place, 20, f"K = {max_staleness}", color=color))
    return picture(frame.width, frame.height, parts)


if __name__ == "__main__":
    main()
