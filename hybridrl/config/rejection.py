"""Reads the rules by which tokens and responses are rejected: ``0.5 <= token_k1 <= 2``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hybridrl.errors import suggest_name

Level = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3"]

_STATISTICS: dict[str, tuple[Level, Divergence]] = {
    "token_k1": ("token", "k1"),
    "token_k2": ("token", "k2"),
    "token_k3": ("token", "k3"),
    "seq_sum_k1": ("seq_sum", "k1"),
    "seq_sum_k2": ("seq_sum", "k2"),
    "seq_sum_k3": ("seq_sum", "k3"),
    "seq_mean_k1": ("seq_mean", "k1"),
    "seq_mean_k2": ("seq_mean", "k2"),
    "seq_mean_k3": ("seq_mean", "k3"),
    "seq_max_k2": ("seq_max", "k2"),
    "seq_max_k3": ("seq_max", "k3"),
}
_NUMBER = r"(\d*\.?\d+(?:e[+-]?\d+)?)"
_RULE = re.compile(rf"(?:{_NUMBER}\s*<=\s*)?(\w+)\s*<=\s*{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Rejection:
    """A bound that a token, or its response, must meet to be kept."""

    level: Level
    divergence: Divergence
    low: float  # of exp(k1), above 0; 0 for k2 and k3, which have none
    high: float  # of exp(k1), or of the divergence, > 0


def read_rejections(text: str) -> tuple[Rejection, ...]:
    """Read rules that are separated by commas; none from an empty text.

    Bounds of k1 are those of ``exp(k1)``, the ratio of sampler over trainer; without a lower one it
    is the inverse of the upper one. Divergences k2 and k3 have an upper bound alone.

    Raises:
        ValueError: not a rule, an unknown statistic, or bounds that no number is between.
    """
    return tuple(_read(rule.strip()) for rule in text.split(",") if rule.strip())


def _read(rule: str) -> Rejection:
    match = _RULE.fullmatch(rule)
    if match is None:
        raise ValueError(f"{rule!r} is no rule; write it as 0.5 <= token_k1 <= 2")
    low, name, high = match.groups()
    if name not in _STATISTICS:
        raise ValueError(f"{name!r} is no statistic; {suggest_name(name, list(_STATISTICS))}")
    level, divergence = _STATISTICS[name]
    if divergence != "k1":
        if low is not None:
            raise ValueError(f"{rule!r}: {name} has no lower bound; write {name} <= {high}")
        return Rejection(level, divergence, 0.0, float(high))
    upper = float(high)
    lower = float(low) if low is not None else 1 / upper if upper else 0.0
    if not 0.0 < lower <= upper:
        raise ValueError(f"{rule!r}: bounds are ratios above 0, the lower one first")
    return Rejection(level, divergence, lower, upper)
