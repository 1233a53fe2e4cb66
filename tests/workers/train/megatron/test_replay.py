from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.batch import TrainBatch, row_offsets
from hybridrl.errors import DataError
from hybridrl.metrics import Metrics
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    merge_metrics,
    rows_of_rank,
    take_step,
)
from tests.workers.train.engines import (
    ACTOR,
    assert_same_weights,
    to_rollouts,
    to_supervised,
    weights_of,
)
from tests.workers.train.megatron.expert_layouts import batches, cut_as
from tests.workers.train.megatron.routes import RoutedPolicy

ALL = (
    *("1", "ep2", "tp2-sp-ep2", "pp2", "pp2-vp2", "pp2-ep2", "cp2-ep2"),
    *("fsdp2", "fsdp2 x 2", "fsdp2 cp2"),
)
FIRST = 5  # rows of the first of two data-parallel ranks, of eleven


def _update_plainly(model: RoutedPolicy, batch: TrainBatch) -> tuple[float, float]:
    return model.update(batch, temperature=0.9, aggregation="token_mean", entropy_coefficient=0.0)


Learned = tuple[list[Metrics], list[Tensor], dict[str, Tensor], int]


def _train(rank: Rank, folder: Path, lessons: list[TrainBatch], changes: dict[str, Any]) -> Learned:
    engine = rank.policy(folder, replace(ACTOR, **changes))
    reported, scored = [], []
    for batch in lessons:
        rows = to_rollouts(rows_of_rank(batch, engine, FIRST))
        rows.routed_experts_BLJK = rows_of_rank(batch, engine, FIRST).routed_experts_BLJK
        scored.append(engine.compute_logprobs(rows, temperature=0.9).logprobs_BL.values())
        reported.append(take_step(engine, batch, first=FIRST))
    return reported, scored, weights_of(engine), engine.dp_rank if engine.is_output_rank else -1


def _scores(answers: list[Learned], step: int) -> Tensor:
    leaders = sorted((answer for answer in answers if answer[3] >= 0), key=lambda a: a[3])
    return torch.cat([scored[step] for _, scored, _, _ in leaders])


@pytest.mark.shows("6.6")
@cut_as(*ALL, replays_routes=True, by_night=("tp2-sp-ep2", "pp2"))
@pytest.mark.parametrize("budget", [pytest.param(10_000, marks=pytest.mark.nightly), 30])
def test_replay_of_own_routes_is_bitwise_identical(
    ranks: RanksUnderTest, folder: Path, budget: int
) -> None:
    model, lessons = RoutedPolicy(folder), []
    for batch in batches():
        lessons.append(model.with_own_routes(batch))
        _update_plainly(model, batch)
    changes = {"max_tokens_per_microbatch": budget}
    replayed = ranks.run(_train, folder, lessons, changes)
    free = ranks.run(_train_freely, folder, batches(), changes)
    for one, other in zip(replayed, free, strict=True):
        assert one[0] == other[0]
        assert all(map(torch.equal, one[1], other[1]))
        assert_same_weights(one[2], other[2])


def _train_freely(
    rank: Rank, folder: Path, lessons: list[TrainBatch], changes: dict[str, Any]
) -> Learned:
    rank.free_routes()
    return _train(rank, folder, lessons, changes)


@pytest.mark.shows("6.6")
@cut_as(*ALL, replays_routes=True)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"max_tokens_per_microbatch": 30}, marks=pytest.mark.nightly),
        {"max_tokens_per_microbatch": 30, "gradient_checkpointing": True},
    ],
    ids=["one pack", "many packs", "computed again"],
)
def test_replay_of_other_routes_equals_a_forced_plain_model(
    ranks: RanksUnderTest, folder: Path, changes: dict[str, Any]
) -> None:
    model = RoutedPolicy(folder)
    lessons = [model.with_random_routes(batch, seed=seed) for seed, batch in enumerate(batches())]
    with torch.no_grad():
        free, _ = model.score(batches()[0], temperature=0.9)
    answers = ranks.run(_train, folder, lessons, changes)
    for step, batch in enumerate(lessons):
        with torch.no_grad():
            logprobs, _ = model.score(batch, temperature=0.9)
        scored = _scores(answers, step)
        torch.testing.assert_close(scored, logprobs, atol=2e-5, rtol=0)
        assert step or (scored - free).abs().max() > 0.1
        loss, grad_norm = _update_plainly(model, batch)
        reported = merge_metrics([metrics[step] for metrics, _, _, _ in answers])
        assert reported["loss/policy"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert reported["policy/grad_norm"] == pytest.approx(grad_norm, rel=1e-5)
    assert_same_weights(answers[0][2], model.weights(), atol=1e-5)


def _score_by_both(rank: Rank, folder: Path, batch: TrainBatch) -> tuple[Tensor, ...]:
    policy = rank.policy(folder)
    reference = rank.reference(folder, policy=policy)
    rows = to_rollouts(batch)
    free = reference.compute_logprobs(rows, temperature=0.9)
    rows.routed_experts_BLJK = batch.routed_experts_BLJK
    scores = [engine.compute_logprobs(rows, temperature=0.9) for engine in (policy, reference)]
    return tuple(score.logprobs_BL.values() for score in (*scores, free))


@cut_as("1", replays_routes=True)
def test_the_reference_chooses_its_own_experts(ranks: RanksUnderTest, folder: Path) -> None:
    batch = RoutedPolicy(folder).with_random_routes(batches()[0], seed=3)
    for policy, reference, free in ranks.run(_score_by_both, folder, batch):
        assert torch.equal(reference, free)
        assert not torch.equal(policy, free)


def _be_refused(rank: Rank, folder: Path, batch: TrainBatch) -> None:
    engine = rank.policy(folder)
    assert batch.routed_experts_BLJK is not None
    width = len(batch.routed_experts_BLJK.values()[0, 0])
    with pytest.raises(DataError, match=r"not contain the experts.*actor\.replay_routing=false"):
        take_step(engine, batches()[0])
    with pytest.raises(DataError, match="do not contain the experts"):
        engine.compute_logprobs(to_rollouts(batches()[0]), temperature=0.9)
    with pytest.raises(DataError, match="do not contain the experts"):
        engine.fit(to_supervised(batches()[0]))
    with pytest.raises(DataError, match=f"3 layers, {width} per token, and the model has 4"):
        take_step(engine, _change(batch, lambda experts: experts[:, :3]))
    for wrong in (-1, 6):
        with pytest.raises(DataError, match=r"token 0 of row 1 names an expert"):
            take_step(engine, _change(batch, lambda experts, wrong=wrong: _spoil(experts, wrong)))
    take_step(engine, batch)


def _change(batch: TrainBatch, change: Any) -> TrainBatch:
    changed = batch.clone()
    experts_BLJK = batch.routed_experts_BLJK
    assert experts_BLJK is not None
    changed.routed_experts_BLJK = torch.nested.nested_tensor_from_jagged(
        change(experts_BLJK.values().clone()), row_offsets(experts_BLJK)
    )
    return changed


def _spoil(experts_TJK: Tensor, wrong: int) -> Tensor:
    second_row = int((experts_TJK[:, 1, 0] < 0).nonzero()[0]) + 1
    experts_TJK[second_row, 1, 0] = wrong
    return experts_TJK


@cut_as("1", replays_routes=True)
def test_rows_without_experts_are_rejected(ranks: RanksUnderTest, folder: Path) -> None:
    batch = RoutedPolicy(folder).with_own_routes(batches()[0])
    ranks.run(_be_refused, folder, batch)
