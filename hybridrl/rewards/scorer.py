"""Scores responses, and says which one a reward function failed on. Legend: B responses."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from hybridrl.config.reward import RewardConfig
from hybridrl.errors import RewardError, suggest_name
from hybridrl.rewards import functions
from hybridrl.rewards.runner import (
    CallFailed,
    CallHung,
    ChildRunner,
    InProcessRunner,
    RewardInputs,
    RewardRunner,
)

log = logging.getLogger(__name__)

_IN_PROCESS = {
    "exact_match": functions.exact_match,
    "sorted_prefix": functions.sorted_prefix,
}
_IN_CHILD = {"math": (Path(__file__).with_name("math_answers.py"), "score_math")}
BUILT_IN = (*_IN_PROCESS, *_IN_CHILD)
"""Names that ``reward.function`` may hold besides a path."""

LARGEST_REWARD = 1e15
"""Beyond it float32 loses more than units, and squares of rewards (their deviation, a critic's
loss) come near the 3e38 at which float32 ends."""

_MAX_HANGS = 3
_MAX_TEXT = 80

Outcome = float | str
"""A reward, or why there is none."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of B responses."""

    rewards_B: Tensor  # float32, at most LARGEST_REWARD in size; 0 where scoring failed
    is_failed_B: Tensor  # bool


def load_runner(function: str, *, timeout_s: float) -> RewardRunner:
    """Find a reward function.

    Args:
        function: a built-in name, or ``path/to/file.py:function``.
        timeout_s: seconds for one call, where the function can be killed.

    Raises:
        RewardError: no such name or file, or the file cannot be loaded.
    """
    if function in _IN_PROCESS:
        return InProcessRunner(_IN_PROCESS[function])
    if function in _IN_CHILD:
        path, name = _IN_CHILD[function]
        return ChildRunner(path, name, timeout_s=timeout_s)
    file, colon, name = function.rpartition(":")
    if not colon:
        raise RewardError(
            f"reward.function={function!r} is not built in; {suggest_name(function, BUILT_IN)} "
            "For your own set reward.function=path/to/file.py:function"
        )
    if not Path(file).is_file():
        raise RewardError(
            f"reward.function={function!r}: {file} is not a file; "
            f"paths are relative to {Path.cwd()}"
        )
    return ChildRunner(Path(file), name, timeout_s=timeout_s)


class RewardScorer:
    """Holds one reward function for the run; close it, or use it in a ``with``."""

    def __init__(self, config: RewardConfig) -> None:
        """Load the function, so that a wrong path ends the run before it began.

        Raises:
            RewardError: it cannot be loaded.
        """
        self._config = config
        self._runner = load_runner(config.function, timeout_s=config.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, inputs: RewardInputs) -> Scores:
        """Score B responses.

        A failed call is repeated response by response, to find the one that fails.

        Raises:
            RewardError: with ``on_error="stop"``, the function raised, hung or ended its process.
                Or it returned another number of rewards, or a value that is not a number that
                training can compute with. Names function, response and prompt.
        """
        outcomes = self._call(inputs)
        is_failed_B = torch.tensor([isinstance(outcome, str) for outcome in outcomes])
        if is_failed_B.any():
            index = int(is_failed_B.nonzero()[0])
            message = self._describe(inputs, index, reason=str(outcomes[index]))
            if self._config.on_error == "stop":
                raise RewardError(f"{message}; correct it, or set reward.on_error=zero")
            log.warning(
                "scored 0: num_failed=%d of=%d; %s", int(is_failed_B.sum()), len(inputs), message
            )
        rewards = [0.0 if isinstance(outcome, str) else outcome for outcome in outcomes]
        return Scores(torch.tensor(rewards, dtype=torch.float32), is_failed_B)

    def close(self) -> None:
        """End the reward process, if there is one. Twice is a no-op."""
        self._runner.close()

    def _call(self, inputs: RewardInputs) -> list[Outcome]:
        try:
            return self._call_checked(inputs)
        except CallFailed as failure:
            log.warning("reward function failed on %d responses: %s", len(inputs), failure)
            outcomes = self._call_singly(inputs)
            if self._config.on_error == "stop" and not any(isinstance(o, str) for o in outcomes):
                raise RewardError(
                    f"reward.function={self._config.function}: a call with {len(inputs)} responses "
                    f"{failure}, though each alone is scored; correct it, or raise "
                    f"reward.timeout_s={self._config.timeout_s:g} if it is only slow"
                ) from failure
            return outcomes

    def _call_checked(self, inputs: RewardInputs) -> list[Outcome]:
        values = self._runner.call(inputs)
        if len(values) != len(inputs):
            raise CallFailed(f"returned {len(values)} rewards for {len(inputs)} responses")
        return [_check(value) for value in values]

    def _call_singly(self, inputs: RewardInputs) -> list[Outcome]:
        outcomes: list[Outcome] = []
        num_hangs = 0
        for index in range(len(inputs)):
            try:
                outcomes += self._call_checked(inputs.one(index))
            except CallFailed as failure:
                outcomes.append(str(failure))
                num_hangs += isinstance(failure, CallHung)
                if self._config.on_error == "stop" or num_hangs == _MAX_HANGS:
                    break
        # Each hang costs timeout_s: after three of them the rest is given up.
        return outcomes + ["not tried after others hung"] * (len(inputs) - len(outcomes))

    def _describe(self, inputs: RewardInputs, index: int, *, reason: str) -> str:
        response, prompt = _shorten(inputs.responses[index]), _shorten(inputs.prompts[index])
        return (
            f"reward.function={self._config.function}: response {index} {response} "
            f"to prompt {prompt}: {reason}"
        )


def _check(value: float | str) -> Outcome:
    if isinstance(value, str):
        return f"returned {_shorten(value)}, must be a number"
    if not math.isfinite(value):
        return f"returned {value}, must be finite"
    if abs(value) > LARGEST_REWARD:
        return (
            f"returned {value:g}, must lie within -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, "
            "since advantages are computed in float32; scale the rewards"
        )
    return value


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "...")
