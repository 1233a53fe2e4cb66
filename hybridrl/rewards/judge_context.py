"""The room that a judge needs: the longest form of its question, and its answer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hybridrl.config.architecture import read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.reward import RewardPart
from hybridrl.errors import ModelError
from hybridrl.rewards.judge_reader import judge_arguments

_PER_SAMPLED_TOKEN = 3
"""Tokens of a judge: a sampled byte that is no UTF-8 becomes U+FFFD, which has three bytes."""

_CHAT_TEMPLATE = 64
"""Tokens that a chat template adds."""


def max_context_tokens(config: ExperimentConfig, model: str) -> int:
    """Return the longest question plus answer of a frozen model, in tokens.

    Without ``serving.models.MODEL.max_context_tokens`` the longest of all that ask it, as far as
    the model goes.
    """
    served = config.serving.models[model]
    if served.max_context_tokens is not None:
        return served.max_context_tokens
    judges = [part for part in config.reward.judges.values() if part.args.get("model") == model]
    longest = max((_longest(judge, config) for judge in judges), default=config.max_row_tokens)
    with suppress(ModelError):  # a server elsewhere may have a model that is not known here
        return min(longest, read_architecture(Path(str(served.path))).max_positions)
    return longest


def _longest(judge: RewardPart, config: ExperimentConfig) -> int:
    args = judge_arguments(judge)
    template = str(args["template"])
    sampled, given = config.rollout.max_response_tokens, config.data.max_prompt_tokens
    columns = {
        "{response}": _PER_SAMPLED_TOKEN * sampled,
        "{answer}": sampled,
        "{prompt}": given,
        "{source}": given,
    }
    of_columns = sum(template.count(column) * size for column, size in columns.items())
    return len(template.encode()) + of_columns + _CHAT_TEMPLATE + int(args["max_tokens"])
