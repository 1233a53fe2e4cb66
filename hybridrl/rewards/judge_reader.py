"""Reads scores from the answers of judges, in a process that can be killed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.config.reward import RewardPart
from hybridrl.rewards.child import Reward
from hybridrl.rewards.judge import judge
from hybridrl.rewards.pool import RewardPool
from hybridrl.rewards.runner import RewardInputs, find_function


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """The answer of a judge about one response."""

    text: str = ""

    failure: str = ""
    """Why it said nothing; empty if it answered."""


def judge_arguments(part: RewardPart) -> Mapping[str, Any]:
    """Return the arguments of a judge by name, with the defaults of those that are not given."""
    parameters = inspect.signature(judge).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return {**defaults, **part.args}


class JudgeReader:
    """Holds a process for each judge; close it."""

    def __init__(self, judges: Mapping[str, RewardPart], *, timeout_s: float) -> None:
        """Start the processes.

        Args:
            judges: by the name of their reward.
            timeout_s: seconds that one answer may take to be read.
        """
        self._missing = {n: float(judge_arguments(p)["missing_score"]) for n, p in judges.items()}
        self._pools: dict[str, RewardPool] = {}
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for name, part in judges.items():
                self._pools[name] = RewardPool(
                    [find_function(part)], num_processes=1, timeout_s=timeout_s
                )
            on_error.pop_all()

    def read(
        self, name: str, answers: Sequence[JudgeAnswer], inputs: RewardInputs
    ) -> tuple[dict[int, Reward], set[int]]:
        """Return a reward for each response, and the rows whose answer has no score.

        Args:
            answers: of the judge, B of them.
            inputs: B responses that it was asked about.
        """
        silent: dict[int, Reward] = {
            row: answer.failure for row, answer in enumerate(answers) if answer.failure
        }
        said = replace(inputs, responses=[answer.text for answer in answers])
        outcomes = self._pools[name].score(said, stop_at_failure=False, known=[silent])
        scores = outcomes.by_function[0]
        unreadable = {
            row for row, score in scores.items() if isinstance(score, float) and math.isnan(score)
        }
        return {**scores, **dict.fromkeys(unreadable, self._missing[name])}, unreadable

    def close(self) -> None:
        """End the processes. Twice is a no-op."""
        for pool in self._pools.values():
            pool.close()
