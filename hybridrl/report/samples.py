"""Which of a run's responses to show: those of some steps, and how held-out answers changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.report.history import parse_row, plottable, read_lines

_STEP = re.compile(rb'\{"step": (\d+)')
_EVAL = b'"split": "eval"'
_MAX_STEPS = 12
_MAX_PROMPTS = 8
_MAX_CHARS = 4000


@dataclass(frozen=True, slots=True)
class Samples:
    """Lines of ``samples.jsonl``, cleaned."""

    train: Mapping[int, Sequence[dict[str, Any]]]
    """Responses by step: some steps, spread evenly, with the first and the last."""

    held_out: Mapping[str, Sequence[dict[str, Any]]]
    """Responses by prompt: the answers of several steps to the same prompt."""


def read_samples(path: Path) -> Samples:
    """Choose from ``samples.jsonl``; a line that is not chosen is not parsed."""
    lines: dict[bool, dict[int, list[bytes]]] = {True: defaultdict(list), False: defaultdict(list)}
    for line in read_lines(path):
        match = _STEP.match(line)
        if match and line.endswith(b"\n"):
            # A response may hold the mark as text, but with its quotes escaped.
            lines[_EVAL in line][int(match[1])].append(line)
    train = {step: _parse(lines[False][step]) for step in spread(sorted(lines[False]))}
    by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in spread(sorted(lines[True])):
        for sample in _parse(lines[True][step]):
            by_prompt[sample["prompt"]].append(sample)
    return Samples(train, dict(list(by_prompt.items())[:_MAX_PROMPTS]))


def spread(steps: Sequence[int]) -> list[int]:
    """Return some of many steps, evenly spaced, with the first and the last."""
    if len(steps) <= _MAX_STEPS:
        return list(steps)
    gap = (len(steps) - 1) / (_MAX_STEPS - 1)
    return [steps[round(number * gap)] for number in range(_MAX_STEPS)]


def _parse(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return samples of bounded size, whatever a model wrote and a reward function returned."""
    samples = []
    for row in filter(None, map(parse_row, lines)):
        texts = {name: str(row.get(name, "")) for name in ("prompt", "response", "answer")}
        for name, text in texts.items():
            if len(text) > _MAX_CHARS:
                texts[name] = f"{text[:_MAX_CHARS]} … {len(text)} characters"
        tokens, logprobs = (
            row[name] if isinstance(row.get(name), list) else [] for name in ("tokens", "logprobs")
        )
        numbers = {
            "reward": plottable(row.get("reward")),
            "logprobs": list(map(plottable, logprobs)),
        }
        cut = bool(row.get("is_truncated"))
        samples.append(
            {"step": row["step"], "is_truncated": cut, "tokens": list(map(str, tokens))}
            | texts
            | numbers
        )
    return samples
