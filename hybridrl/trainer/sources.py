"""Mean rewards by the source of a row."""

from __future__ import annotations

from collections import defaultdict

from hybridrl.data.source import PromptStep
from hybridrl.metrics import Mean
from hybridrl.rewards.scorer import Scores


def rewards_by_source(task: PromptStep, scores: Scores) -> dict[str, Mean]:
    """Return the mean reward of each source, if there are several; else nothing.

    A name of the hub, as ``openai/gsm8k``, becomes one word of a metric's name: ``openai_gsm8k``.

    Args:
        task: P prompts.
        scores: of P * G responses, those to one prompt adjacent.
    """
    rewards = scores.rewards_B.tolist()
    num_responses = len(rewards) // len(task.rows)
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, reward in enumerate(rewards):
        by_source[task.rows[row // num_responses].row.source.replace("/", "_")].append(reward)
    if len(by_source) == 1:
        return {}
    return {name: Mean(sum(values), float(len(values))) for name, values in by_source.items()}
