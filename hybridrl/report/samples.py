"""Which of a run's responses to show: the last ones, and how held-out prompts changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.report.history import parse_row

_HEAD = re.compile(rb'\{"step": (\d+)')
_EVAL = b'"split": "eval"'
_MAX_SHOWN_STEPS = 12
_MAX_STORIES = 8
_MAX_CHARS = 4000


def read_samples(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Choose from ``samples.jsonl``; lines that are not chosen are not parsed.

    Returns:
        ``steps``: training samples of some steps, spread evenly, with the first and the last.
        ``stories``: prompts that were answered at several steps, with all their answers.
    """
    train, held_out = _index(path)
    chosen = [{"step": step, "samples": _parse(train[step])} for step in spread(sorted(train))]
    return {"steps": [group for group in chosen if group["samples"]], "stories": _tell(held_out)}


def spread(steps: Sequence[int], *, max_steps: int = _MAX_SHOWN_STEPS) -> list[int]:
    """Return at most ``max_steps`` of ``steps``, evenly spaced, with the first and the last."""
    if len(steps) <= max_steps:
        return list(steps)
    gap = (len(steps) - 1) / (max_steps - 1)
    return [steps[round(number * gap)] for number in range(max_steps)]


def _index(path: Path) -> tuple[dict[int, list[bytes]], dict[int, list[bytes]]]:
    train: dict[int, list[bytes]] = defaultdict(list)
    held_out: dict[int, list[bytes]] = defaultdict(list)
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                head = _HEAD.match(line)
                if head and line.endswith(b"\n"):
                    # A response may hold the mark as text, but with its quotes escaped.
                    (held_out if _EVAL in line else train)[int(head[1])].append(line)
    return train, held_out


def _parse(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    return [_shorten(row) for line in lines if (row := parse_row(line)) is not None]


def _shorten(sample: dict[str, Any]) -> dict[str, Any]:
    """A page stays small whatever a model writes."""
    texts = {name: str(sample.get(name, "")) for name in ("prompt", "response", "answer")}
    cut = {
        name: text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} … {len(text)} characters"
        for name, text in texts.items()
    }
    return sample | cut


def _tell(held_out: dict[int, list[bytes]]) -> list[dict[str, Any]]:
    stories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in spread(sorted(held_out)):
        for sample in _parse(held_out[step]):
            stories[sample["prompt"]].append(sample)
    told = [{"prompt": prompt, "samples": samples} for prompt, samples in stories.items()]
    return told[:_MAX_STORIES]
