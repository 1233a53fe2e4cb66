"""Which of a run's responses to show: the last ones, and how held-out prompts changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hybridrl.report.history import parse_row, plottable

_HEAD = re.compile(rb'\{"step": (\d+)')
_EVAL = b'"split": "eval"'
_MAX_SHOWN_STEPS = 12
_MAX_STORIES = 8
_MAX_CHARS = 4000


def read_samples(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Choose from ``samples.jsonl``; lines that are not chosen are neither parsed nor kept.

    Returns:
        ``steps``: training samples of some steps, spread evenly, with the first and the last.
        ``stories``: prompts that were answered at several steps, with all their answers.
    """
    if not path.is_file():
        return {"steps": [], "stories": []}
    with path.open("rb") as file:
        train, held_out = _index(file)
        groups = [
            {"step": step, "samples": _read(file, train[step])} for step in spread(sorted(train))
        ]
        told = {step: _read(file, held_out[step]) for step in spread(sorted(held_out))}
    return {"steps": [group for group in groups if group["samples"]], "stories": _tell(told)}


def spread(steps: Sequence[int], *, max_steps: int = _MAX_SHOWN_STEPS) -> list[int]:
    """Return at most ``max_steps`` of ``steps``, evenly spaced, with the first and the last."""
    if len(steps) <= max_steps:
        return list(steps)
    gap = (len(steps) - 1) / (max_steps - 1)
    return [steps[round(number * gap)] for number in range(max_steps)]


def _index(file: BinaryIO) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Say where the lines of each step begin: of training, and of evaluation."""
    train: dict[int, list[int]] = defaultdict(list)
    held_out: dict[int, list[int]] = defaultdict(list)
    place = 0
    for line in file:
        head = _HEAD.match(line)
        if head and line.endswith(b"\n"):
            # A response may hold the mark as text, but with its quotes escaped.
            (held_out if _EVAL in line else train)[int(head[1])].append(place)
        place += len(line)
    return train, held_out


def _read(file: BinaryIO, places: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    for place in places:
        file.seek(place)
        rows.append(parse_row(file.readline()))
    return [_shorten(row) for row in rows if row is not None]


def _shorten(sample: dict[str, Any]) -> dict[str, Any]:
    """A page stays small whatever a model writes, and can be drawn whatever it was scored."""
    texts = {name: str(sample.get(name, "")) for name in ("prompt", "response", "answer")}
    cut = {
        name: text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} … {len(text)} characters"
        for name, text in texts.items()
    }
    tokens, logprobs = (_list_of(sample, name) for name in ("tokens", "logprobs"))
    scored = {
        "reward": plottable(sample.get("reward")),
        "tokens": [str(token) for token in tokens],
        "logprobs": [plottable(logprob) for logprob in logprobs],
    }
    return sample | cut | scored


def _list_of(sample: dict[str, Any], name: str) -> list[Any]:
    values = sample.get(name)
    return values if isinstance(values, list) else []


def _tell(held_out: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    stories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for samples in held_out.values():
        for sample in samples:
            stories[sample["prompt"]].append(sample)
    told = [{"prompt": prompt, "samples": samples} for prompt, samples in stories.items()]
    return told[:_MAX_STORIES]
