"""Reads scores from the answers of judges, in a process that can be killed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.reward import RewardPart
from hybridrl.errors import ModelError
from hybridrl.models.architecture import read_architecture
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


def max_context_tokens(config: ExperimentConfig, model: str) -> int:
    """Return the longest question plus answer of a frozen model, in tokens.

    By default the question has room for a row of the policy in which each sampled token is three:
    a byte that is no UTF-8 becomes U+FFFD, which has three. The model's own context is the limit.
    """
    served = config.serving.models[model]
    if served.max_context_tokens is not None:
        return served.max_context_tokens
    row = config.max_row_tokens + 2 * config.rollout.max_response_tokens
    asking = [judge_arguments(part) for part in config.reward.judges.values()]
    own = [len(args["template"].encode()) + int(args["max_tokens"]) for args in asking]
    longest = row + max(own, default=0)
    with suppress(ModelError):  # a server elsewhere may have a model that is not known here
        longest = min(longest, read_architecture(Path(str(served.path))).max_positions)
    return longest


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
