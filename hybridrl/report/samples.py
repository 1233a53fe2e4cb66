"""A choice of a run's responses: those of some steps, and held-out answers over time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hybridrl.report.history import parse_row, plottable, read_lines

_STEP = re.compile(rb'\{"step": (\d+)')
_EVAL = b'"split": "eval"'
_MAX_STEPS = 12
_MAX_PROMPTS = 8
_MAX_CHARS = 4000
_MAX_TURNS = 100


@dataclass(frozen=True, slots=True)
class Samples:
    """Lines of ``samples.jsonl``, cleaned."""

    train: Mapping[int, Sequence[dict[str, Any]]]
    """Responses by step: some steps, spread evenly, with the first and the last."""

    held_out: Mapping[str, Sequence[dict[str, Any]]]
    """Responses by prompt: the answers of several steps to the same prompt."""

    @property
    def has_conversations(self) -> bool:
        """Whether a response has several turns."""
        rows = chain.from_iterable([*self.train.values(), *self.held_out.values()])
        return any(row["turns"] for row in rows)


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
    changed_most = sorted(held_out, key=lambda prompt: -_change(held_out[prompt]))[:_MAX_PROMPTS]
    return Samples(train, {prompt: held_out[prompt] for prompt in changed_most})


def _change(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return by how much the reward of the last answer is another than that of the first."""
    return abs(float(answers[-1]["reward"] or 0.0) - float(answers[0]["reward"] or 0.0))


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
    tokens, logprobs = (_list_of(row, name) for name in ("tokens", "logprobs"))
    return {
        **{name: _shortened(text) for name, text in texts.items()},
        "step": row["step"],
        "is_truncated": bool(row.get("is_truncated")),
        "reward": plottable(row.get("reward")),
        "tokens": list(map(str, tokens)),
        "logprobs": list(map(plottable, logprobs)),
        "turns": [_clean_turn(turn) for turn in _list_of(row, "turns")[:_MAX_TURNS]],
    }


def _clean_turn(turn: object) -> dict[str, Any]:
    known = turn if isinstance(turn, dict) else {}
    num_tokens = known.get("num_tokens")
    return {
        "role": str(known.get("role", "")),
        "text": _shortened(str(known.get("text", ""))),
        "num_tokens": num_tokens if isinstance(num_tokens, int) else 0,
        "reward": plottable(known.get("reward")),
        "calls": [
            {
                "name": str(call.get("name", "")),
                "arguments": _shortened(str(call.get("arguments", ""))),
                "is_error": bool(call.get("is_error")),
            }
            for call in _list_of(known, "calls")
            if isinstance(call, dict)
        ],
    }


def _list_of(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} … {len(text)} characters"
