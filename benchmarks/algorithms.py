"""Learning curves of algorithms on the default task: three seeds each, from one starter model.

Prints a table in Markdown and draws the curves. The held-out prompts are 512 where a default run
has 128, so that chance moves an accuracy by .02 instead of .04. A finished run is kept in
.cache/benchmarks/algorithms, and is read from there by the same command at the same commit.
A benchmark that was interrupted goes on with the run that it was at.

    python -m benchmarks.algorithms [KEY=VALUE ...] [--recipes algorithms/gspo ...] [--seeds 0 1 2]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.sides.curves import (
    Curves,
    Run,
    curves_parser,
    kept,
    read_run,
    starter_model,
    write_picture,
)
from benchmarks.sides.measure import print_head, print_row, train

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


def main() -> None:
    parser = curves_parser("algorithms", __doc__)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
    options = parser.parse_args()
    overrides = [*_OVERRIDES, *options.overrides]
    curves: dict[str, list[Run]] = {RECIPES.get(name, name): [] for name in options.recipes}
    model = starter_model(overrides, options.cache)
    for seed in options.seeds:
        for recipe, runs in zip(options.recipes, curves.values(), strict=True):
            words = [f"recipes={recipe}", *overrides, f"model.path={model}", "model.starter=null"]
            words.append(f"seed={seed}")
            name = f"{Path(recipe).name}-"
            runs.append(kept(name, words, options.cache, partial(measured, words)))
    print_table(curves, num_seeds=len(options.seeds))
    write_picture(options.picture, curves)


def measured(words: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory(prefix="curves-") as scratch:
        return read_run(train(words, Path(scratch)))


def print_table(curves: Curves, *, num_seeds: int) -> None:
    """Print what each recipe came to."""
    print(f"Held-out accuracy of greedy responses, {num_seeds} seed(s); minutes are those of the")
    print("quickest run, from its first step to its last.\n")
    print_head("recipe", "steps", "before", "final, mean", "final, min to max", "best", "minutes")
    for title, runs in curves.items():
        finals = [run.accuracies[-1] for run in runs]
        means = (mean(run.accuracies[0] for run in runs), mean(finals))
        spread = f"{min(finals):.3f} to {max(finals):.3f}"
        best = max(max(run.accuracies) for run in runs)
        minutes = min(run.minutes for run in runs)
        before, final = (f"{one:.3f}" for one in means)
        steps = runs[0].steps[-1]
        print_row(title, steps, before, final, spread, f"{best:.3f}", f"{minutes:.1f}")


if __name__ == "__main__":
    main()
