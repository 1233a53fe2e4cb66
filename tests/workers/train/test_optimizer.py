from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from hybridrl.metrics import merge
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.model_engine import step_metrics
from hybridrl.workers.train.optimizer import GuardedAdamW, StepResult, learning_rate
from tests.workers.train.engines import CPU, OPTIMIZER


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.84, 0.68, 0.52, 0.36, 0.2, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 0.9236068, 0.7236068, 0.4763932, 0.2763932, 0.2, 0.2]),
    ],
)
def test_the_rate_rises_and_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    config = replace(
        OPTIMIZER,
        lr=1.0,
        num_warmup_steps=3,
        min_lr_ratio=0.2,
        schedule=schedule,  # type: ignore[arg-type]
    )
    rates = [learning_rate(config, step=step, num_total_steps=8) for step in range(10)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_that_falls_to_0_wastes_no_step(schedule: Literal["linear", "cosine"]) -> None:
    config = replace(OPTIMIZER, schedule=schedule, min_lr_ratio=0.0, num_warmup_steps=1)
    assert learning_rate(config, step=3, num_total_steps=4) > 0
    assert learning_rate(config, step=4, num_total_steps=4) == 0
    at_once = replace(config, num_warmup_steps=0)
    assert learning_rate(at_once, step=0, num_total_steps=1) == OPTIMIZER.lr


@pytest.mark.parametrize(
    ("loss", "grad"), [(torch.inf, 1.0), (torch.nan, 1.0), (1.0, torch.inf), (1.0, torch.nan)]
)
def test_neither_weights_nor_moments_nor_schedule_see_a_bad_step(loss: float, grad: float) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    guarded = GuardedAdamW([parameter], config=OPTIMIZER, num_total_steps=4, ranks=Ranks(CPU))
    parameter.grad = torch.ones(2, 2)
    guarded.step(torch.tensor(0.0))
    before = [parameter.detach().clone(), *(t.clone() for t in guarded.state())]
    parameter.grad = torch.tensor([[1.0, 1.0], [1.0, grad]])
    assert guarded.step(torch.tensor(loss)).is_skipped
    assert guarded.num_steps == 1
    for tensor, old in zip([parameter, *guarded.state()], before, strict=True):
        assert torch.equal(tensor, old)
    assert parameter.grad is None


@pytest.mark.parametrize("area", ["policy", "critic"])
def test_the_rate_of_a_step_is_that_of_its_last_update(area: str) -> None:
    updates = [StepResult(grad_norm=1.0, lr=lr, is_skipped=False) for lr in (0.3, 0.2)]
    metrics = merge(step_metrics(result, area=area, counts=True) for result in updates)
    assert metrics[f"{area}/lr"].value == 0.2
