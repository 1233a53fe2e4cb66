"""The ``reward`` section."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.functions.signatures import names_at_top_level, required_parameters
from hybridrl.config.limits import Arguments, Name, Processes, Seconds

BUILT_IN_REWARDS: Mapping[str, str] = {
    **dict.fromkeys(("exact_match", "sorted_prefix", "numeric", "length", "format"), "functions"),
    "math": "math_answers",
    "code": "code_answers",
    "http": "remote",
    "reasoning_gym": "reasoning_gym_answers",
    **dict.fromkeys(("model", "agent", "judge"), "functions"),
}
"""Module below ``hybridrl.rewards`` by the name of the function in it."""

MODEL = "model"
"""The function whose scores the ranks compute."""

JUDGE = "judge"
"""The function that reads a score from the answer of a served model."""

AGENT = "agent"
"""The function that returns the rewards that the agent gave."""

BATCH_COLUMNS = ("responses", "answers", "prompts", "sources", "lengths", "conversations")
"""Inputs of a function that scores several rows in a call; lengths are in tokens."""

ROW_COLUMNS = ("response", "answer", "prompt", "source", "length", "conversation")
"""The same inputs, of a function that scores one row in a call."""

TIMEOUT = "timeout_s"
"""Another input: the seconds that the call may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPart:
    """One of several reward functions."""

    function: str
    """As ``reward.function``."""

    weight: Annotated[float, Field(ge=-1e6, le=1e6, examples=[1.0])] = 1.0
    """Factor of this reward in the sum that is the reward of a response."""

    args: Arguments = field(default_factory=dict)
    """As ``reward.args``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How responses are scored. Mirrors hydra_configs/reward/*.yaml key by key."""

    function: str | None
    """A built-in name (exact_match, sorted_prefix, numeric, length, format, math, code,
    http, reasoning_gym, model, agent, judge) or ``path/to/file.py:function``. Null with
    ``reward.functions``."""

    args: Arguments
    """Numbers and texts of the function: its keyword-only parameters."""

    functions: Mapping[Name, RewardPart]
    """Several functions, each with a name, a weight (1) and its own args. The sum of weights times
    rewards is the reward of a response. Empty: ``reward.function`` alone."""

    num_processes: Processes | None
    """Processes that score slices of the responses. Null: as many as the driver may use cores, at
    most 16. With 1, a function of ``responses`` gets all responses of a step in one call."""

    timeout_s: Seconds
    """Seconds that one call may take: of a slice, or of one response with a function of
    ``response``."""

    on_error: Literal["stop", "leave_out", "zero"]
    """``stop`` ends the run with the failing response. ``leave_out`` learns from the others alone;
    ``zero`` learns that it is worth 0, as if the policy were to blame. Both count it."""

    @property
    def parts(self) -> Mapping[str, RewardPart]:
        """The functions by name; one alone has the name that it was given."""
        if self.function is None:
            return self.functions
        name = self.function.rpartition(":")[2]
        return {name: RewardPart(function=self.function, args=self.args)}

    @property
    def own_columns(self) -> tuple[str, ...]:
        """Columns of the data that functions ask for by name, besides those that all may have."""
        asked = (name for part in self.parts.values() for name in own_columns(part.function))
        return tuple(dict.fromkeys(asked))

    @property
    def model_paths(self) -> Mapping[str, str]:
        """Folders of the reward models, by the name of their reward."""
        return {
            name: str(part.args["path"])
            for name, part in self.parts.items()
            if part.function == MODEL and "path" in part.args
        }

    @property
    def judges(self) -> Mapping[str, RewardPart]:
        """The functions that ask a served model, by name."""
        return {name: part for name, part in self.parts.items() if part.function == JUDGE}

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Names of the rewards that an agent gives."""
        return tuple(name for name, part in self.parts.items() if part.function == AGENT)

    def with_model_paths(self, change: Callable[[str], Path]) -> RewardConfig:
        """Return the same rewards with the folders of models that ``change`` gives for theirs."""
        changed = {
            name: replace(part, args={**part.args, "path": str(change(path))})
            for name, path in self.model_paths.items()
            for part in [self.parts[name]]
        }
        if self.function is not None:
            return replace(self, args=changed[MODEL].args) if changed else self
        return replace(self, functions={**self.functions, **changed})


def own_columns(spelled: str) -> Iterator[str]:
    """Yield the further inputs of a function in a file, as far as its source shows."""
    path, colon, name = spelled.rpartition(":")
    if spelled == "reasoning_gym":
        yield "entry"
    try:
        node = names_at_top_level(Path(path)).get(name) if colon else None
    except SyntaxError:  # the checks of rewards name it
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        usual = (*BATCH_COLUMNS, *ROW_COLUMNS, TIMEOUT)
        yield from (each for each in required_parameters(node) if each not in usual)
