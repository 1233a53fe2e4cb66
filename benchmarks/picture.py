"""Draws the learning curve of a finished run, as the README shows it.

``python -m benchmarks.picture RUN_FOLDER docs/images/run.svg``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sides.drawing import BLUE, ORANGE, Frame, Point, picture, words
from benchmarks.sides.measure import read_metrics

_WINDOW = 10
"""Steps of the running mean."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("picture", type=Path, help="SVG to write")
    options = parser.parse_args()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(draw(read_metrics(options.folder)), encoding="utf-8")


def draw(steps: Sequence[dict[str, float]]) -> str:
    """Return an SVG: rewards step by step, their running mean, and the evaluations."""
    rewards, evaluations = (
        [(step["step"], step[name]) for step in steps if step.get(name) is not None]
        for name in ("reward/mean", "eval/reward/mean")
    )
    frame = Frame(last_x=max(x for x, _ in [*rewards, *evaluations]))
    marks = [round(frame.last_x * fifth / 5) for fifth in range(6)]
    parts = [
        *frame.axes([tenth / 10 for tenth in range(0, 11, 2)], [(x, f"{x}") for x in marks]),
        frame.curve(rewards, BLUE, width=1, opacity=0.3),
        frame.curve(smooth(rewards), BLUE),
        frame.curve(evaluations, ORANGE),
        words(58, 20, f"training reward, mean over {_WINDOW} steps", color=BLUE),
        words(316, 20, "held-out prompts (greedy)", color=ORANGE),
        words(frame.width / 2, frame.height - 8, "step", anchor="middle"),
    ]
    for point in evaluations:
        x, y = frame.pixel(point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{ORANGE}"/>')
        parts.append(words(x, y - 9, f"{point[1]:.2f}", color=ORANGE, anchor="middle"))
    return picture(frame.width, frame.height, parts)


def smooth(points: Sequence[Point]) -> list[Point]:
    """Replace each value by the mean of the last ``_WINDOW`` values, itself included."""
    windows = (points[max(0, end - _WINDOW) : end] for end in range(1, len(points) + 1))
    return [(window[-1][0], sum(y for _, y in window) / len(window)) for window in windows]


if __name__ == "__main__":
    main()
