"""Learning curves of rows that are K steps old when the run learns from them, by their correction.

The default task, model and learning rate (3e-5), and the same at 1e-4, where the policy moves
further in a step; at 3e-4 even K = 0 learns nothing. Engine and trainer take turns in one process
(``benchmarks/sides/ahead_in_turns.py``), so that every row has its age exactly. Prints a table in
Markdown and draws the curves. A finished run is kept in .cache/benchmarks/staleness, and is read
from there the next time.

    OMP_NUM_THREADS=1 python -m benchmarks.staleness [KEY=VALUE ...] [--seeds 0 1 2]
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from benchmarks.sides.ahead_in_turns import train_in_turns
from benchmarks.sides.curves import (
    Curves,
    Run,
    curves_parser,
    kept,
    run_of,
    starter_model,
    write_picture,
)
from benchmarks.sides.measure import print_head, print_row

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

_ALL = {**SETTINGS, **OTHERS}


def main() -> None:
    parser = curves_parser("staleness", __doc__)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=_ALL)
    options = parser.parse_args()
    overrides = [*_OVERRIDES, *options.overrides]
    model = starter_model(overrides, options.cache)
    curves: dict[str, list[Run]] = {title: [] for title in options.settings}
    for seed in options.seeds:
        for title, runs in curves.items():
            max_staleness, correction = _ALL[title]
            words = [*overrides, *correction, f"seed={seed}"]
            measure = partial(measured, words, model, max_staleness)
            runs.append(kept("", [title, *words], options.cache, measure))
    print_table(curves)
    write_picture(options.picture, curves)


def measured(words: Sequence[str], model: Path, max_staleness: int) -> Run:
    begin = time.perf_counter()
    rows = train_in_turns(words, model, max_staleness).rows
    return run_of(rows, minutes=(time.perf_counter() - begin) / 60)


def print_table(curves: Curves) -> None:
    """Print what each setting came to."""
    print(f"Held-out accuracy of greedy responses, {len(next(iter(curves.values())))} seed(s).\n")
    print_head(
        *("rows", "steps", "before", "halfway, mean", "final, mean", "final, min to max", "best"),
        "effective samples, second half",
    )
    for title, runs in curves.items():
        columns = list(zip(*(one.accuracies for one in runs), strict=True))
        final = columns[-1]
        means = [fmean(columns[at]) for at in (0, len(columns) // 2, -1)]
        shares = [one.effective for one in runs if one.effective is not None]
        print_row(
            title,
            runs[0].steps[-1],
            *(f"{one:.3f}" for one in means),
            f"{min(final):.3f} to {max(final):.3f}",
            f"{max(max(one.accuracies) for one in runs):.3f}",
            f"{fmean(shares):.2f}" if shares else "",
        )


if __name__ == "__main__":
    main()
