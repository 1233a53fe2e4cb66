from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification

from hybridrl.algorithms import aggregate
from hybridrl.algorithms.load import Part
from hybridrl.errors import PhaseError
from hybridrl.metrics import Metrics
from hybridrl.workers.train.protocol import TrainState
from hybridrl.workers.train.value_engines import CriticEngine
from tests.contract.layouts import TIES_AND_FAMILIES, on_layouts
from tests.contract.plain import PlainCritic, weights_in
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    output_metrics,
    rows_of_rank,
)
from tests.contract.steps import assert_steps
from tests.tiny_models import Family
from tests.workers.train.engines import (
    ACTOR,
    OPTIMIZER,
    assert_same_weights,
    make_lessons,
    make_rows,
    to_rollouts,
)

pytestmark = on_layouts(lambda engine: engine.has_critic)


def _values(engine: CriticEngine, batch: Any) -> Tensor | None:
    values = engine.compute_values(to_rollouts(batch)).values_BL.values()
    assert values.dtype == torch.float32
    return values if engine.is_output_rank else None


def _begin(rank: Rank, folder: Path, target: Path) -> Tensor | None:
    engine = rank.critic(folder)
    engine.export_hf(target)
    return _values(engine, make_rows(5))


@pytest.mark.parametrize(("ties", "some"), TIES_AND_FAMILIES)
def test_new_critic_values_0_on_the_policys_body(
    ranks: RanksUnderTest,
    make_model: Any,
    tmp_path: Path,
    ties: Sequence[bool],
    some: Sequence[Family],
) -> None:
    for family, tie in zip(ranks.families_among(some), cycle(ties), strict=False):
        folder = make_model(ranks.layout, tie=tie, family=family)
        target = tmp_path / family
        for values in ranks.run(_begin, folder, target):
            assert values is None or not values.any()
        body = AutoModel.from_pretrained(folder, dtype="float32").state_dict()
        if (
            type(AutoConfig.from_pretrained(target))
            not in AutoModelForTokenClassification._model_mapping
        ):
            continue  # transformers has no such class; the values above were of hybridrl's
        loaded = AutoModelForTokenClassification.from_pretrained(target).state_dict()
        assert {*loaded} == {*(f"model.{name}" for name in body), "score.weight", "score.bias"}
        assert all(torch.equal(loaded[f"model.{name}"], tensor) for name, tensor in body.items())


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the critic's configuration."""
    first: int = 8
    """Rows of the first of two data-parallel ranks, of twelve."""
    aggregation: str = "token_mean"
    value_clip: float = 0.0


def _train(
    rank: Rank, folder: Path, target: Path, case: Case
) -> tuple[list[Metrics], Tensor | None]:
    config = replace(ACTOR, **case.changes)
    engine = rank.critic(folder, config, value_clip=case.value_clip)
    aggregation = Part.of(vars(aggregate)[case.aggregation])
    steps = []
    for seed in range(2):
        lessons = rows_of_rank(make_lessons(12, seed=seed, num_siblings=4), engine, case.first)
        metrics = engine.update(lessons, aggregation=aggregation)
        steps.append(output_metrics(engine, metrics))
        engine.compute_values(to_rollouts(make_rows(3)))  # must not disturb anything
        for part in (TrainState.PARAMETERS, TrainState.OPTIMIZER):
            assert engine.resident_bytes(part) > 0
        for part in TrainState:
            engine.offload(part)
            assert engine.resident_bytes(part) == 0
        with pytest.raises(PhaseError, match=r"compute_values\(\) needs parameters"):
            engine.compute_values(to_rollouts(make_rows(3)))
        for part in TrainState:
            engine.restore(part)
    assert engine.num_updates == 2
    engine.export_hf(target)
    return steps, _values(engine, make_rows(6, seed=9, num_siblings=3))


@cache
def _train_plainly(
    folder: Path, aggregation: str, value_clip: float
) -> tuple[list[tuple[float, float]], dict[str, Tensor], Tensor]:
    model = PlainCritic(folder, OPTIMIZER)
    lessons = [make_lessons(12, seed=seed, num_siblings=4) for seed in range(2)]
    steps = [
        model.update(batch, aggregation=aggregation, value_clip=value_clip) for batch in lessons
    ]
    with torch.no_grad():
        values = model.values(make_rows(6, seed=9, num_siblings=3))
    return steps, model.weights(), values


CASES = {
    "one micro-batch": Case(),
    "many micro-batches": Case({"max_tokens_per_microbatch": 25}),
    "a rank without rows": Case({"max_tokens_per_microbatch": 25}, first=12),
    "activations computed again": Case({"gradient_checkpointing": True}, first=4),
    "every response the same": Case(aggregation="sequence_mean_token_mean"),
    "values that stop at the clip": Case({"max_tokens_per_microbatch": 25}, value_clip=0.2),
}


@pytest.mark.shows("6.1")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_steps_and_values_are_those_of_the_plain_model(
    ranks: RanksUnderTest, folder: Path, tmp_path: Path, case: Case
) -> None:
    expected, trained, values = _train_plainly(folder, case.aggregation, case.value_clip)
    answers = ranks.run(_train, folder, tmp_path / "exported", case)
    steps = [answer[0] for answer in answers]
    found = assert_steps(
        steps, expected, loss="loss/value", norm="critic/grad_norm", rel_of_norm=2e-5
    )
    assert all((metrics["critic/clip_fraction"] > 0) == bool(case.value_clip) for metrics in found)
    assert not any("data/train_tokens" in metrics for metrics in found)  # the policy's are counted
    assert_same_weights(weights_in(tmp_path / "exported"), trained, atol=1e-5)
    assert values.any()
    for computed in (answer[1] for answer in answers if answer[1] is not None):
        torch.testing.assert_close(computed, values, atol=2e-5, rtol=0)
