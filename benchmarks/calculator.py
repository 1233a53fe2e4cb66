"""The learning curve of recipes=cpu/calculator, with its tool and without: a table and a picture.

python -m benchmarks.calculator [KEY=VALUE ...] [--seeds 0 1]
"""

from __future__ import annotations

from functools import partial

from benchmarks.algorithms import measured, print_table
from benchmarks.sides.curves import Run, curves_parser, kept, write_picture

_KINDS = {"with the tool": (), "without": ("agent=single_turn",)}
_OVERRIDES = (
    *("recipes=cpu/calculator", "eval.num_prompts=256", "checkpoint.every_num_steps=0"),
    *("trainer.export_hf=false", "tracking.live=off", "tracking.trackers=[]"),
)


def main() -> None:
    parser = curves_parser("calculator", __doc__)
    parser.set_defaults(seeds=[0, 1])
    options = parser.parse_args()
    curves: dict[str, list[Run]] = {kind: [] for kind in _KINDS}
    for kind, words in _KINDS.items():
        for seed in options.seeds:
            told = [*_OVERRIDES, *words, *options.overrides, f"seed={seed}"]
            name = f"{kind.replace(' ', '-')}-"
            curves[kind].append(kept(name, told, options.cache, partial(measured, told)))
    print_table(curves, num_seeds=len(options.seeds))
    write_picture(options.picture, curves)


if __name__ == "__main__":
    main()
