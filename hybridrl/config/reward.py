"""The ``reward`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from hybridrl.config.limits import ArgumentValue, Processes, Seconds, Within

BUILT_IN_REWARDS: Mapping[str, str] = {
    **dict.fromkeys(("exact_match", "sorted_prefix", "numeric", "length", "format"), "functions"),
    "math": "math_answers",
    "code": "code_answers",
    "http": "remote",
}
"""Module below ``hybridrl.rewards`` by the name of the function in it."""

BATCH_COLUMNS = ("responses", "answers", "prompts", "sources", "lengths")
"""Inputs of a function that scores several rows in a call; the last is in tokens."""

ROW_COLUMNS = ("response", "answer", "prompt", "source", "length")
"""The same inputs, of a function that scores one row in a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPart:
    """One of several reward functions."""

    function: str
    """As ``reward.function``."""

    weight: Annotated[
        float, Within(at_least=-1e6, at_most=1e6, usual=1.0, why="float32 keeps seven digits")
    ] = 1.0
    """Factor of this reward in the sum that is the reward of a response."""

    args: Mapping[str, ArgumentValue] = field(default_factory=dict)
    """As ``reward.args``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How responses are scored. Mirrors hydra_configs/reward/*.yaml key by key."""

    function: str | None
    """A built-in name (exact_match, sorted_prefix, numeric, length, format, math, code,
    http) or ``path/to/file.py:function``. Null with ``reward.functions``."""

    args: Mapping[str, ArgumentValue]
    """Numbers and texts of the function: its keyword-only parameters."""

    functions: Mapping[str, RewardPart]
    """Several functions, each with a name, a weight (1) and its own args. The sum of weights times
    rewards is the reward of a response. Empty: ``reward.function`` alone."""

    num_processes: Processes | None
    """Processes that score slices of the responses. Null: as many as the driver may use cores, at
    most 16. With 1, a function of ``responses`` gets all responses of a step in one call."""

    timeout_s: Seconds
    """Seconds that one call may take: of a slice, or of one response with a function of
    ``response``."""

    on_error: Literal["stop", "zero"]
    """``stop`` ends the run with the failing response; ``zero`` scores it 0 and counts it."""

    @property
    def parts(self) -> Mapping[str, RewardPart]:
        """The functions by name; one alone has the name that it was given."""
        if self.function is None:
            return self.functions
        name = self.function.rpartition(":")[2]
        return {name: RewardPart(function=self.function, args=self.args)}
