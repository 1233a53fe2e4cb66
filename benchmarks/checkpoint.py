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

from benchmarks.algorithms import read_metrics, train

_EVERY = 4
_LIMIT = 0.10


def main() -> None:
    """Run, and print a Markdown table."""
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
    usual_s = statistics.median(s["time/step_s"] for s in others)
    waits_s = statistics.median(s["time/checkpoint_s"] for s in after)
    polls_s = statistics.median(s["time/checkpoint_s"] for s in others)
    writing_s = statistics.median(s["time/step_s"] for s in after)
    num_bytes = statistics.median(s["memory/checkpoint_bytes"] for s in steps if _is_done(s))
    print("| figure | seconds | share of a step |")
    print("|---|---|---|")
    print(f"| step without a checkpoint | {usual_s:.3f} | 1 |")
    print(
        f"| waits for a checkpoint ({num_bytes / 1e6:.0f} MB) | {waits_s:.4f} | "
        f"{waits_s / usual_s:.3f} (limit {_LIMIT}) |"
    )
    print(f"| asks whether one is written | {polls_s:.4f} | {polls_s / usual_s:.3f} |")
    print(f"| step during which it is written | {writing_s:.3f} | {writing_s / usual_s:.3f} |")


def _is_done(step: dict[str, float]) -> bool:
    return "memory/checkpoint_bytes" in step


if __name__ == "__main__":
    main()
