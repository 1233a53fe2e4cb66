"""Judges as the driver and the servers know them: answers, arguments, room for questions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.reward import RewardPart
from hybridrl.errors import ModelError
from hybridrl.models.architecture import read_architecture
from hybridrl.rewards.functions import judge


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
    row = config.max_context_tokens + 2 * max(config.response_limits.values())
    asking = [judge_arguments(part) for part in config.reward.judges.values()]
    own = [len(args["template"].encode()) + int(args["max_tokens"]) for args in asking]
    longest = row + max(own, default=0)
    with suppress(ModelError):  # a server elsewhere may have a model that is not known here
        longest = min(longest, read_architecture(Path(str(served.path))).max_positions)
    return longest
