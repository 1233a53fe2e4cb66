"""What a checkpoint costs the step that triggers it, on the default run.

Runs the default with a checkpoint every fourth step, and reads off the run's own metrics: how long
steps wait for a checkpoint (``time/checkpoint_s``), and how much longer the step lasts during which
ranks write it in their threads.

    python -m benchmarks.checkpoint [--steps 60] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.sides.measure import print_head, print_row, read_metrics, train

_EVERY = 4
_LIMIT = 0.10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        words = [f"trainer.num_steps={options.steps}", f"checkpoint.every_num_steps={_EVERY}"]
        words += ["eval.every_num_steps=0", "tracking.live=off", *options.overrides]
        steps = read_metrics(train(words, Path(folder)))
    # The cost of saving after step n stands in the line of step n + 1, which also is the step
    # during which the ranks write.
    after = [s for s in steps if (s["step"] - 1) % _EVERY == 0 and s["step"] > _EVERY]
    others = [s for s in steps if (s["step"] - 1) % _EVERY != 0 and s["step"] > _EVERY]

    def median(name: str, steps: list[dict[str, float]]) -> float:
        return statistics.median(step[name] for step in steps)

    sizes = [s["memory/checkpoint_bytes"] for s in steps if "memory/checkpoint_bytes" in s]
    usual_s, waits_s = median("time/step_s", others), median("time/checkpoint_s", after)
    polls_s, writing_s = median("time/checkpoint_s", others), median("time/step_s", after)
    size = f"{statistics.median(sizes) / 1e6:.0f} MB"
    limit = f"{waits_s / usual_s:.3f} (limit {_LIMIT})"
    print_head("figure", "seconds", "share of a step", num_texts=3)
    print_row("step without a checkpoint", f"{usual_s:.3f}", 1)
    print_row(f"waits for a checkpoint ({size})", f"{waits_s:.4f}", limit)
    print_row("asks whether one is written", f"{polls_s:.4f}", f"{polls_s / usual_s:.3f}")
    print_row("step during which it is written", f"{writing_s:.3f}", f"{writing_s / usual_s:.3f}")


if __name__ == "__main__":
    main()
