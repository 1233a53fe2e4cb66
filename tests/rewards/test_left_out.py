"""Responses that could not be scored: left out of learning, or worth 0."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from hybridrl.config.reward import RewardConfig
from hybridrl.metrics import Mean
from hybridrl.rewards.report import reward_metrics
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer

SOURCE = """
def reward(response):
    return float(response)
"""
INPUTS = RewardInputs(
    responses=["1", "two", "3", "4"],
    answers=["a"] * 4,
    prompts=["p"] * 4,
    sources=["s"] * 4,
    lengths=[1] * 4,
    conversations=[],
)


@pytest.mark.parametrize("on_error", ["leave_out", "zero"])
def test_a_response_that_cannot_be_scored_is_left_out_or_worth_nothing(
    on_error: Literal["leave_out", "zero"], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    config = RewardConfig(
        function=f"{tmp_path}/own.py:reward",
        args={},
        functions={},
        num_processes=1,
        timeout_s=20.0,
        on_error=on_error,
    )
    with RewardScorer(config) as scorer:
        scores = scorer.score(INPUTS)
    assert scores.rewards_B.tolist() == [1.0, 0.0, 3.0, 4.0]
    assert scores.is_failed_B.tolist() == [False, True, False, False]
    metrics = reward_metrics(scores, num_responses=2)
    if on_error == "zero":
        assert scores.is_left_out_B is None
    else:
        assert scores.is_left_out_B is not None
        assert scores.is_left_out_B.tolist() == scores.is_failed_B.tolist()
        assert metrics["reward/left_out_fraction"] == Mean(1.0, 4)
