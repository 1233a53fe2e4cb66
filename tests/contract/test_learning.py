from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridrl.batch import jagged_from, row_lengths
from hybridrl.metrics import Metrics
from tests.contract.layouts import on_layouts
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    output_metrics,
    rows_of_rank,
)
from tests.contract.steps import merged_steps
from tests.workers.train.engines import make_lessons, make_rows, to_rollouts, with_optimizer

pytestmark = on_layouts(first_only=True)


def _learn_returns(rank: Rank, folder: Path) -> tuple[list[Metrics], Any]:
    config = with_optimizer(lr=0.01, eps=1e-8)
    engine, batch = rank.critic(folder, config, value_clip=0.2), make_lessons(6)
    batch.old_values_BL = jagged_from(
        torch.zeros(batch.old_values_BL.values().shape), row_lengths(batch.old_values_BL)
    )
    steps = [
        output_metrics(engine, engine.update(rows_of_rank(batch, engine, 4))) for _ in range(40)
    ]
    values = engine.compute_values(to_rollouts(make_rows(6)))
    return steps, values.values_BL.values() if engine.is_output_rank else None


def test_a_value_stops_at_the_clip_within_a_step(ranks: RanksUnderTest, folder: Path) -> None:
    answers = ranks.run(_learn_returns, folder)
    steps = merged_steps([answer[0] for answer in answers])
    assert steps[0]["critic/clip_fraction"] == 0.0
    assert steps[-1]["critic/clip_fraction"] > 0.4
    for far in (values for _, values in answers if values is not None):
        assert float(far.abs().median()) < 0.4  # else they follow their returns, of deviation 1
