"""Learning curves from one starter model: of algorithms, of stale rows, with a tool and without.

    python -m benchmarks.algorithms [KEY=VALUE ...] [--curves staleness] [--seeds 0 1 2]

Prints a table in Markdown and draws the curves. The held-out prompts are 512 where a default run
has 128, so that chance moves an accuracy by .02 instead of .04. A finished run is kept in
.cache/benchmarks, and is read from there by the same command at the same commit: a benchmark that
was interrupted goes on with the run that it was at. ``--curves staleness`` trains in this process:
type OMP_NUM_THREADS=1 before it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.sides.ahead_in_turns import train_in_turns
from benchmarks.sides.curves import (
    Curves,
    Run,
    kept,
    read_run,
    run_of,
    starter_model,
    write_picture,
)
from benchmarks.sides.measure import CACHE, ROOT, print_head, print_row, train

_QUIET = ("checkpoint.every_num_steps=0", "tracking.trackers=[]")
_AS_COMMAND = (*_QUIET, "trainer.export_hf=false", "tracking.live=off")

ALGORITHMS: Mapping[str, Sequence[str]] = {
    "GRPO": ("recipes=none",),
    "Dr. GRPO": ("recipes=algorithms/dr_grpo",),
    "PPO": ("recipes=algorithms/ppo",),
    "DAPO": ("recipes=algorithms/dapo",),
    "RLOO": ("recipes=algorithms/rloo",),
    "REINFORCE++": ("recipes=algorithms/reinforce_plus_plus",),
    "GSPO": ("recipes=algorithms/gspo",),
    "CISPO": ("recipes=algorithms/cispo",),
}
"""Words of the command by title; another recipe can be asked for by its name."""

CALCULATOR: Mapping[str, Sequence[str]] = {"with the tool": (), "without": ("agent=single_turn",)}

_K1, _K4 = "trainer.max_staleness=1", "trainer.max_staleness=4"
_WEIGHED = "algorithm.rollout_correction=importance"
_NOTHING = (_WEIGHED, "algorithm.rollout_correction_args.level=none")
_CLIPPED = "algorithm.old_logprobs=sampler"
_MASKED = "algorithm.token_mask=off_policy_mask"
_FAST = ("actor.optimizer.lr=1e-4", "trainer.num_steps=60", "eval.every_num_steps=10")

STALENESS: Mapping[str, Sequence[str]] = {
    "K = 0": (),
    "K = 1, clipped": (_K1, _CLIPPED),
    "K = 4, clipped": (_K4, _CLIPPED),
    "K = 4, uncorrected": (_K4, *_NOTHING),
    "1e-4: K = 0": _FAST,
    "1e-4: K = 4, clipped": (*_FAST, _K4, _CLIPPED),
    "1e-4: K = 4, token weights": (*_FAST, _K4, _WEIGHED),
    "1e-4: K = 4, uncorrected": (*_FAST, _K4, *_NOTHING),
}
"""``clipped``: PPO's clip around the policy that sampled; ``token weights``: truncated at 2."""

MORE_STALENESS: Mapping[str, Sequence[str]] = {
    "K = 4, token weights": (_K4, _WEIGHED),
    "K = 4, masked": (_K4, _MASKED),
    "1e-4: K = 1, clipped": (*_FAST, _K1, _CLIPPED),
    "1e-4: K = 1, uncorrected": (*_FAST, _K1, *_NOTHING),
    "1e-4: K = 4, masked": (*_FAST, _K4, _MASKED),
    "1e-4: K = 4, weights, masked": (*_FAST, _K4, _WEIGHED, _MASKED),
}
"""To ask for; ``masked``: bad responses that the policy has left behind are left out."""


def in_a_process(words: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory(prefix="curves-") as scratch:
        return read_run(train(words, Path(scratch)))


def in_turns(words: Sequence[str]) -> Run:
    begin = time.perf_counter()
    rows = train_in_turns(words).rows
    return run_of(rows, minutes=(time.perf_counter() - begin) / 60)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveSet:
    """Curves that stand in one table and one picture."""

    settings: Mapping[str, Sequence[str]]
    more: Mapping[str, Sequence[str]]
    shared: Sequence[str]
    """Words of all settings."""

    measure: Callable[[Sequence[str]], Run] = in_a_process
    has_one_model: bool = True
    """Whether all start from the starter model of seed 0."""


SETS = {
    "algorithms": CurveSet(
        settings=ALGORITHMS,
        more={},
        shared=("eval.num_prompts=512", "eval.every_num_steps=10", *_AS_COMMAND),
    ),
    "calculator": CurveSet(
        settings=CALCULATOR,
        more={},
        shared=("recipes=cpu/calculator", "eval.num_prompts=256", *_AS_COMMAND),
        has_one_model=False,
    ),
    "staleness": CurveSet(
        settings=STALENESS,
        more=MORE_STALENESS,
        shared=(
            *("eval.num_prompts=512", "eval.every_num_steps=20", *_QUIET),
            *("tracking.num_samples_per_step=0", "cluster.num_threads_per_rank=1"),
        ),
        measure=in_turns,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curves", choices=SETS, default="algorithms")
    parser.add_argument("--settings", nargs="+", help="titles, or names of recipes")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--cache", type=Path, help="folder of finished runs")
    parser.add_argument("--picture", type=Path, help="SVG to write")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    chosen, name = SETS[options.curves], options.curves
    cache = options.cache or CACHE / name
    shared = [*chosen.shared, *options.overrides]
    model = []
    if chosen.has_one_model:
        model = [f"model.path={starter_model(shared, cache)}", "model.starter=null"]
    known = {**chosen.settings, **chosen.more}
    curves: dict[str, list[Run]] = {one: [] for one in options.settings or chosen.settings}
    for seed in options.seeds:
        for title, runs in curves.items():
            words = [*shared, *known.get(title, [f"recipes={title}"]), *model, f"seed={seed}"]
            runs.append(kept(title, words, cache, partial(chosen.measure, words)))
    print_table(curves)
    write_picture(options.picture or ROOT / "docs" / "images" / f"{name}.svg", curves)


def print_table(curves: Curves) -> None:
    num_seeds = len(next(iter(curves.values())))
    print(f"Held-out accuracy of greedy responses, {num_seeds} seed(s); minutes are those of the")
    print("quickest run, from its first step to its last.\n")
    print_head(
        *("setting", "steps", "before", "halfway, mean", "final, mean", "final, min to max"),
        *("best", "minutes", "effective samples, second half"),
    )
    for title, runs in curves.items():
        columns = list(zip(*(run.accuracies for run in runs), strict=True))
        final = columns[-1]
        means = [fmean(columns[at]) for at in (0, len(columns) // 2, -1)]
        shares = [run.effective for run in runs if run.effective is not None]
        print_row(
            *(title, runs[0].steps[-1], *(f"{mean:.3f}" for mean in means)),
            *(f"{min(final):.3f} to {max(final):.3f}", f"{max(map(max, columns)):.3f}"),
            *(f"{min(run.minutes for run in runs):.1f}", f"{fmean(shares):.2f}" if shares else ""),
        )


if __name__ == "__main__":
    main()
