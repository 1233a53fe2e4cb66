"""The files of a run folder, which may still grow, read once for rules, charts and tables."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from hybridrl import env
from hybridrl.config.foreign.spelling import flatten, read_yaml
from hybridrl.errors import RunFolderError
from hybridrl.log import MANAGER, SERVER_LOGS

SCORES: Sequence[tuple[str, Callable[[Sequence[float]], float]]] = (
    *(("eval/reward/mean", max), ("reward/mean", max)),
    *(("eval/accuracy", max), ("preference/accuracy", max)),
    *(("eval/loss_nats", min), ("loss/supervised_nats", min)),
)
"""Metrics that runs are compared by, the first that a run has; and which value is the best."""

EVALUATIONS = [(name, best) for name, best in SCORES if name.startswith("eval/")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder, which may still grow."""

    folder: Path
    history: History
    settings: Settings
    log_lines: Sequence[str] = ()
    """The end of log.txt."""
    manager_lines: Sequence[str] = ()
    """The end of the rollout manager's log."""

    num_unreadable: int = 0
    """Complete lines of metrics.jsonl that are damaged."""

    @property
    def num_done(self) -> int:
        """Steps that were recorded."""
        return self.history.steps[-1] if self.history.steps else 0

    @property
    def num_steps(self) -> int:
        """Number of steps of the complete run."""
        return int(self.settings.number("trainer.num_steps") or 0)

    @property
    def best_evaluation(self) -> tuple[float, int] | None:
        """The best held-out reward or accuracy, or the lowest held-out loss, and its step."""
        for name, choose in EVALUATIONS:
            if (series := self.history.get(name)).finite:
                return series.best(choose)
        return None


def read_run(folder: Path) -> Run:
    """Read a run folder, also of a running run; raises a RunFolderError if it is none."""
    missing = [name for name in ("config.yaml", "metrics.jsonl") if not (folder / name).is_file()]
    if missing:
        raise RunFolderError(
            f"{folder} is no run folder: it has no {' and no '.join(missing)}; "
            "name the folder that trainer.run_dir gave"
        )
    rows, num_unreadable = [], 0
    for line in read_lines(folder / "metrics.jsonl"):
        if (row := parse_metrics(line)) is not None:
            rows.append(row)
        elif line.endswith(b"\n"):  # else it is being written
            num_unreadable += 1
    return Run(
        folder=folder.resolve(),
        history=History(rows),
        num_unreadable=num_unreadable,
        settings=Settings.read(folder / "config.yaml"),
        log_lines=_read_log(folder / "log.txt"),
        manager_lines=_read_log(folder / SERVER_LOGS / f"{MANAGER}.txt"),
    )


def _read_log(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - (64 << 10)))
        return file.read().decode("utf-8", errors="replace").splitlines()


_DEFAULTS = env.CONFIG_ROOT / "hydra_configs"


class Settings:
    """Dotted keys and values of ``config.yaml``."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self.flat = dict(flatten(values))

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read a file; a file without a YAML mapping gives no keys."""
        return cls(_load(path))

    def number(self, key: str) -> float | None:
        """Return the value of a key if it is a number."""
        value = _comparable(self.flat.get(key))
        return value if isinstance(value, float) and math.isfinite(value) else None

    def text(self, key: str) -> str:
        """Return the value of a key as typed; empty if there is no such key."""
        return to_text(self.flat[key]) if key in self.flat else ""

    def changes(self, defaults: Settings) -> dict[str, tuple[object, object]]:
        """Return keys whose value differs, with the default and the value; both as plain text.

        A key without a default is not a change: it belongs to a chosen option. Nor is a default
        that is known only at the start of a run (the name of its folder).
        """
        return {
            key: (defaults.flat[key], value)
            for key, value in self.flat.items()
            if key in defaults.flat
            and "${" not in str(defaults.flat[key])
            and _comparable(value) != _comparable(defaults.flat[key])
        }


def read_defaults() -> Settings:
    """Compose the defaults as Hydra would: each section with the option that config.yaml names."""
    values = _load(_DEFAULTS / "config.yaml")
    sections: dict[str, Any] = {}
    for entry in values.get("defaults", []):
        if isinstance(entry, dict):
            for section, option in entry.items():
                sections[section] = _load(_DEFAULTS / str(section) / f"{option}.yaml")
    plain = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    return Settings(sections | plain)


def _load(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def to_text(value: object) -> str:
    """Write a value as typed on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _comparable(value: object) -> object:
    """Return the same for every spelling of a number: YAML 1.1 reads 1e-4 as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


_LARGEST = 1e150


@dataclass(frozen=True, slots=True)
class Series:
    """One metric: the steps that logged it, and its values."""

    steps: list[int]
    """Rising."""

    values: list[float | None]
    """None for a value that was not finite, or too large to square."""

    @property
    def finite(self) -> list[float]:
        """The finite values, in order."""
        return [value for value in self.values if value is not None]

    def best(self, choose: Callable[[Sequence[float]], float]) -> tuple[float, int]:
        """Return the best number, and the first step that has it; there is at least one."""
        number = choose(self.finite)
        return number, self.steps[self.values.index(number)]

    def mean_of_last(self, num_values: int) -> float | None:
        """Return the mean of the last numbers; None if there are fewer."""
        finite = self.finite
        return fmean(finite[-num_values:]) if len(finite) >= num_values else None

    @property
    def is_constant(self) -> bool:
        """Whether it has the same value in each of several steps."""
        return len(self.steps) > 2 and len(set(self.values)) == 1

    @property
    def reach(self) -> int:
        """Steps on either side over which a running mean is taken: 4 % of the run in all."""
        return max(2, round(len(self.steps) * 0.02))

    def running_mean(self) -> Series:
        """Average each number with its neighbours."""
        sums = list(accumulate((value or 0.0 for value in self.values), initial=0.0))
        counts = list(accumulate((value is not None for value in self.values), initial=0))
        size = len(self.values)
        starts = chain(repeat(0, self.reach), range(size))
        stops = chain(range(self.reach + 1, size + 1), repeat(size))
        means = [
            None if value is None else (sums[stop] - sums[start]) / (counts[stop] - counts[start])
            for value, start, stop in zip(self.values, starts, stops, strict=False)
        ]
        return Series(self.steps, means)

    def downsample(self, max_points: int = 1000) -> Series:
        """Keep the lowest and the highest of neighbouring values, so that no spike is lost.

        A browser stays smooth with 1000 points a line.
        """
        if len(self.steps) <= max_points:
            return self
        kept: list[int] = []
        num_buckets = max_points // 2
        for number in range(num_buckets):
            ends = (len(self.steps) * n // num_buckets for n in (number, number + 1))
            bucket = range(*ends)
            finite = [place for place in bucket if self.values[place] is not None]
            ranked = sorted(finite, key=lambda place: self.values[place] or 0.0) or [bucket[0]]
            kept += sorted({ranked[0], ranked[-1]})
        return Series([self.steps[n] for n in kept], [self.values[n] for n in kept])


class History:
    """Every metric of a run by name."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Read lines of ``metrics.jsonl``; a later line of a step adds to it, or replaces."""
        by_step: dict[int, Mapping[str, Any]] = {}
        for row in rows:
            former = by_step.get(row["step"])
            by_step[row["step"]] = row if former is None else {**former, **row}
        self.steps = sorted(by_step)
        self.elapsed_s = [plottable(by_step[step].get("elapsed_s")) for step in self.steps]
        self._series: dict[str, Series] = defaultdict(lambda: Series([], []))
        for names, of_names in groupby((by_step[step] for step in self.steps), key=tuple):
            alike = list(of_names)  # most steps log the same metrics: column by column
            steps = [row["step"] for row in alike]
            columns = zip(*(row.values() for row in alike), strict=True)
            for name, values in zip(names, columns, strict=True):
                if "/" in name:
                    self._series[name].steps.extend(steps)
                    self._series[name].values.extend(map(plottable, values))
        self.names = [name for name, series in self._series.items() if series.finite]
        """Metrics with at least one number, in the order in which they were first logged."""

    def get(self, name: str) -> Series:
        """Return a metric; one without values if it was never logged."""
        return self._series.get(name, Series([], []))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; none if it does not exist."""
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is incomplete or not an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """Return a line of ``metrics.jsonl``; None if it is damaged, which its step may be, too."""
    row = parse_row(line)
    step = None if row is None else row.get("step")
    return row if type(step) is int and 0 <= step < 1 << 63 else None


def plottable(value: object) -> float | None:
    """Return a number that can be averaged and squared; None for any other value."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int)):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # false for NaN


_STEP = re.compile(rb'\{"step": (\d+)')
_MAX_STEPS = 12
_MAX_CHARS = 4000
_IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]{1,100000}")


@dataclass(frozen=True, slots=True)
class Samples:
    """Lines of ``samples.jsonl``, cleaned."""

    train: Mapping[int, Sequence[dict[str, Any]]]
    """Responses by step: some steps, spread evenly, with the first and the last."""

    held_out: Mapping[str, Sequence[dict[str, Any]]]
    """Responses by prompt and its images: the answers of several steps to the same."""

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
            sample = _clean(row)
            held_out["\0".join([sample["prompt"], *sample["images"]])].append(sample)
        elif row is not None:
            train[step].append(_clean(row))
    changed_most = sorted(held_out, key=lambda prompt: -_change(held_out[prompt]))[:8]
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
            yield b'"split": "eval"' in line, int(match[1]), line


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
        "turns": [_clean_turn(turn) for turn in _list_of(row, "turns")[:100]],
        "images": [url for url in map(str, _list_of(row, "images")[:16]) if _IMAGE.fullmatch(url)],
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
