"""Draws the learning curve of a finished run, as the README shows it.

``python -m benchmarks.picture RUN_FOLDER docs/images/run.svg``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

WINDOW = 10
"""Steps of the running mean."""

WIDTH, HEIGHT, MARGIN = 760, 300, 46
_TRAIN, _EVAL, _TEXT, _GRID = "#4051b5", "#d9480f", "#57606a", "#d0d7de"
Point = tuple[float, float]


def main() -> None:
    """Read ``metrics.jsonl`` and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="run folder")
    parser.add_argument("picture", type=Path, help="SVG to write")
    options = parser.parse_args()
    lines = (options.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(draw([json.loads(line) for line in lines]), encoding="utf-8")


def draw(steps: Sequence[dict[str, float | None]]) -> str:
    """Return an SVG: rewards step by step, their running mean, and the evaluations."""
    rewards, evaluations = _points(steps, "reward/mean"), _points(steps, "eval/reward/mean")
    last_step = max(x for x, _ in [*rewards, *evaluations])
    curves = [
        _curve(rewards, last_step, color=_TRAIN, width=1, opacity=0.3),
        _curve(smooth(rewards), last_step, color=_TRAIN, width=2.5, opacity=1),
        _curve(evaluations, last_step, color=_EVAL, width=2.5, opacity=1),
        *(_dot(point, last_step) for point in evaluations),
    ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_axes(last_step),
        *curves,
        _words(MARGIN + 12, 20, f"training reward, mean over {WINDOW} steps", _TRAIN),
        _words(MARGIN + 270, 20, "held-out prompts (greedy)", _EVAL),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def smooth(points: Sequence[Point]) -> list[Point]:
    """Replace each value by the mean of the last `WINDOW` values, itself included."""
    values = [y for _, y in points]
    windows = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    means = [sum(window) / len(window) for window in windows]
    return [(x, mean) for (x, _), mean in zip(points, means, strict=True)]


def _points(steps: Sequence[dict[str, float | None]], name: str) -> list[Point]:
    rows = ((row["step"], row.get(name)) for row in steps)
    return [(step, value) for step, value in rows if step is not None and value is not None]


def _place(point: Point, last_step: float) -> Point:
    """Return the pixel of a step and a value from 0 to 1."""
    x = MARGIN + point[0] / last_step * (WIDTH - 2 * MARGIN)
    return x, HEIGHT - MARGIN - point[1] * (HEIGHT - 2 * MARGIN)


def _curve(
    points: Sequence[Point], last_step: float, *, color: str, width: float, opacity: float
) -> str:
    pixels = " ".join("{:.1f},{:.1f}".format(*_place(point, last_step)) for point in points)
    style = f'stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"'
    return f'<polyline fill="none" {style} points="{pixels}"/>'


def _dot(point: Point, last_step: float) -> str:
    x, y = _place(point, last_step)
    label = _words(x, y - 9, f"{point[1]:.2f}", _EVAL, anchor="middle")
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_EVAL}"/>{label}'


def _axes(last_step: float) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        left, y = _place((0, tenth / 10), last_step)
        line = f'x1="{left}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"'
        parts += [f"<line {line}/>", _words(left - 8, y + 4, f"{tenth / 10}", anchor="end")]
    for fifth in range(6):
        step = round(last_step * fifth / 5)
        x, y = _place((step, 0), last_step)
        parts.append(_words(x, y + 20, f"{step}", anchor="middle"))
    return [*parts, _words(WIDTH / 2, HEIGHT - 8, "step", anchor="middle")]


def _words(x: float, y: float, text: str, color: str = _TEXT, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    main()
