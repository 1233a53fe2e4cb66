"""A choice of a run's responses: those of some steps, and held-out answers over time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
    """Choose from ``samples.jsonl``; lines that are not chosen are neither kept nor parsed."""
    steps: dict[bool, set[int]] = {True: set(), False: set()}
    for is_eval, step, _ in _read(path):
        steps[is_eval].add(step)
    chosen = {is_eval: set(spread(sorted(of_split))) for is_eval, of_split in steps.items()}
    train: dict[int, list[dict[str, Any]]] = defaultdict(list)
    held_out: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for is_eval, step, line in _read(path):
        row = parse_row(line) if step in chosen[is_eval] else None
        if row is not None and is_eval:
            held_out[str(row.get("prompt", ""))].append(_clean(row))
        elif row is not None:
            train[step].append(_clean(row))
    return Samples(train, dict(list(held_out.items())[:_MAX_PROMPTS]))


def _read(path: Path) -> Iterator[tuple[bool, int, bytes]]:
    """Yield each complete line with its split and step."""
    for line in read_lines(path):
        match = _STEP.match(line)
        if match and line.endswith(b"\n"):
            # A response may contain the mark as text, but with its quotes escaped.
            yield _EVAL in line, int(match[1]), line


def spread(steps: Sequence[int]) -> list[int]:
    """Return some of many steps, evenly spaced, with the first and the last."""
    if len(steps) <= _MAX_STEPS:
        return list(steps)
    gap = (len(steps) - 1) / (_MAX_STEPS - 1)
    return [steps[round(number * gap)] for number in range(_MAX_STEPS)]


def _clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of bounded size, for any output of a model and of a reward function."""
    texts = {name: str(row.get(name, "")) for name in ("prompt", "response", "answer")}
    turns = [turn for turn in row.get("turns") or () if isinstance(turn, dict)]
    if turns:
        spoken = (f"[{turn.get('role')}] {turn.get('text')}" for turn in turns)
        texts["response"] = "\n".join(spoken)
    for name, text in texts.items():
        if len(text) > _MAX_CHARS:
            texts[name] = f"{text[:_MAX_CHARS]} … {len(text)} characters"
    tokens, logprobs = (
        row[name] if isinstance(row.get(name), list) else [] for name in ("tokens", "logprobs")
    )
    return {
        **texts,
        "step": row["step"],
        "is_truncated": bool(row.get("is_truncated")),
        "reward": plottable(row.get("reward")),
        "tokens": [] if turns else list(map(str, tokens)),
        "logprobs": list(map(plottable, logprobs)),
    }
