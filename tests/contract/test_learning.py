"""Many steps of each engine lead where they should: on its first layout, since steps are the same.

That they are, is in test_updates.py and test_critics.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.batch import jagged_from, row_lengths
from hybridrl.config.model import LoraConfig
from hybridrl.metrics import Metrics
from tests.contract.layouts import on_layouts
from tests.contract.ranks_under_test import (
    NO_ADAPTER,
    Rank,
    RanksUnderTest,
    merge_metrics,
    output_metrics,
    rows_of_rank,
    take_step,
)
from tests.workers.train import critics
from tests.workers.train.critics import make_lessons
from tests.workers.train.engines import make_rows, to_rollouts, to_supervised, with_optimizer
from tests.workers.train.lora_engines import LORA

pytestmark = on_layouts(first_only=True)


def _improve(rank: Rank, folder: Path) -> float:
    engine, batch = rank.policy(folder), make_rows(6)
    rollouts = to_rollouts(batch)
    before = engine.compute_logprobs(rollouts, temperature=0.9).logprobs_BL.values()
    for _ in range(3):
        take_step(engine, batch)
    after = engine.compute_logprobs(rollouts, temperature=0.9).logprobs_BL.values()
    return float(((after - before) * batch.advantages_BL.values()).sum())


def test_policy_gradient_raises_above_average_responses(
    ranks: RanksUnderTest, folder: Path
) -> None:
    assert max(ranks.run(_improve, folder)) > 0


def _learn_answers(rank: Rank, folder: Path, lora: LoraConfig) -> list[Metrics]:
    engine = rank.policy(folder, with_optimizer(lr=0.02, eps=1e-8), lora=lora)
    batch = to_supervised(make_rows(6))
    return [output_metrics(engine, engine.fit(rows_of_rank(batch, engine, 4))) for _ in range(25)]


@pytest.mark.parametrize("lora", [NO_ADAPTER, LORA], ids=["whole", "adapter"])
def test_supervised_steps_learn_the_answers(
    ranks: RanksUnderTest, folder: Path, lora: LoraConfig
) -> None:
    if lora.enabled and not ranks.engine.has_adapters:
        pytest.skip(f"{ranks.layout.engine} has no adapters")
    answers = ranks.run(_learn_answers, folder, lora)
    steps = [merge_metrics(list(a)) for a in zip(*answers, strict=True)]
    assert steps[-1]["loss/supervised_nats"] < 0.3 * steps[0]["loss/supervised_nats"]


def _learn_returns(rank: Rank, folder: Path, value_clip: float) -> tuple[list[Metrics], Any]:
    config = replace(critics.with_optimizer(lr=0.01, eps=1e-8), value_clip=value_clip)
    engine, batch = rank.critic(folder, config), make_lessons(6)
    batch.old_values_BL = jagged_from(
        torch.zeros(batch.old_values_BL.values().shape), row_lengths(batch.old_values_BL)
    )
    steps = [
        output_metrics(engine, engine.update(rows_of_rank(batch, engine, 4))) for _ in range(40)
    ]
    values = engine.compute_values(to_rollouts(make_rows(6)))
    return steps, values.values_BL.values() if engine.is_output_rank else None


def test_a_critic_learns_its_returns(ranks: RanksUnderTest, folder: Path) -> None:
    answers = ranks.run(_learn_returns, folder, 0.0)
    steps = [merge_metrics(list(a)) for a in zip(*(answer[0] for answer in answers), strict=True)]
    assert steps[-1]["loss/value"] < 0.1 * steps[0]["loss/value"]
    batch = make_lessons(6)
    mask, returns = batch.response_mask_BL.values(), batch.returns_BL.values()
    for learnt in (values for _, values in answers if values is not None):
        missed = (learnt - returns)[mask]
        assert float(missed.square().mean()) < 0.2 * float(returns[mask].var())


def test_a_value_stops_at_the_clip_within_a_step(ranks: RanksUnderTest, folder: Path) -> None:
    answers = ranks.run(_learn_returns, folder, 0.2)
    steps = [merge_metrics(list(a)) for a in zip(*(answer[0] for answer in answers), strict=True)]
    assert steps[0]["critic/clip_fraction"] == 0.0
    assert steps[-1]["critic/clip_fraction"] > 0.4
    for far in (values for _, values in answers if values is not None):
        assert float(far.abs().median()) < 0.4  # else they follow their returns, of deviation 1
