"""The learning curve of recipes=cpu/calculator, with its tool and without: a table and a picture.

Run folders are kept, and are read from there the next time.

    python -m benchmarks.calculator [KEY=VALUE ...] [--seeds 0 1]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.algorithms import Run, draw, print_table, read_run, train
from benchmarks.publish import ROOT

_KINDS = {"with the tool": [], "without": ["agent=single_turn"]}
_OVERRIDES = (
    *("recipes=cpu/calculator", "eval.num_prompts=256", "checkpoint.every_num_steps=0"),
    *("trainer.export_hf=false", "tracking.live=off", "tracking.trackers=[]"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], metavar="SEED")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache/benchmarks/calculator")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/calculator.svg")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    curves: dict[str, list[Run]] = {}
    for kind, words in _KINDS.items():
        curves[kind] = []
        for seed in options.seeds:
            scratch = options.folder / f"{kind.replace(' ', '-')}-{seed}"
            if not (scratch / "run" / "report.html").is_file():  # the end of a run writes it
                scratch.mkdir(parents=True, exist_ok=True)
                train([*_OVERRIDES, *words, f"seed={seed}", *options.overrides], scratch)
            curves[kind].append(read_run(scratch / "run"))
    print_table(curves, num_seeds=len(options.seeds))
    options.picture.write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
