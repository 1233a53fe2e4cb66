"""Optimizer steps of the policy, however it and its rows are cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.sequence import gspo
from hybridrl.batch import TrainBatch, jagged_from, response_lengths, row_lengths
from hybridrl.metrics import Metrics
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.optimizer import learning_rate
from tests.contract.layouts import on_layouts
from tests.contract.plain import RESPONSE_CLIP, PlainPolicy
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    assert_float32_learns,
    copy_state,
    merge_metrics,
    output_metrics,
    rank_ranges,
    rows_of_rank,
    take_step,
)
from tests.workers.train.engines import (
    ACTOR,
    LOSS,
    OPTIMIZER,
    after,
    assert_same_weights,
    make_rows,
    rows_of,
    to_rollouts,
    to_supervised,
    weights_of,
    with_nan_advantage,
    with_optimizer,
)

pytestmark = on_layouts(compares_numbers=True)

NUM_STEPS = 2


@dataclass(frozen=True)
class Case:
    """A way to compute the same steps, and which steps those are."""

    config: dict[str, Any] = field(default_factory=dict, hash=False)
    first: int = 8
    """Rows of the first of two data-parallel ranks, of eleven."""
    aggregation: str = "token_mean"
    entropy_coefficient: float = 0.0
    clips_responses: bool = False
    tie: bool = True


CASES = {
    "one micro-batch": Case(),
    "many micro-batches": Case(config={"max_tokens_per_microbatch": 30}),
    "a rank without rows": Case(config={"max_tokens_per_microbatch": 30}, first=11, tie=False),
    "activations computed again": Case(
        config={"max_tokens_per_microbatch": 30, "gradient_checkpointing": True}
    ),
    "every response the same": Case(aggregation="sequence_mean_token_mean", tie=False),
    "the ratio of whole responses": Case(
        config={"max_tokens_per_microbatch": 30},
        aggregation="sequence_mean_token_mean",
        clips_responses=True,
    ),
    "an entropy bonus": Case(
        config={"max_tokens_per_microbatch": 30}, entropy_coefficient=0.1, tie=False
    ),
}


@cache
def _lessons(folder: Path) -> list[TrainBatch]:
    """Eleven rows a step, whose prompts are shared by up to four, some ratios beyond the clip."""
    model = PlainPolicy(folder, OPTIMIZER)
    lessons = []
    for seed in range(NUM_STEPS):
        batch = rows_of(make_rows(12, seed=seed, num_siblings=4), range(11))
        with torch.no_grad():
            logprobs, _ = model.score(batch, temperature=0.9)
        noise = 0.3 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed))
        old = (logprobs + noise) * batch.response_mask_BL.values()
        batch.old_logprobs_BL = jagged_from(old, row_lengths(batch.token_ids_BL))
        lessons.append(batch)
    return lessons


@dataclass(frozen=True)
class Training:
    """What steps led to."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    logprobs: Tensor


@cache
def _train_plainly(
    folder: Path, aggregation: str, entropy_coefficient: float, clips_responses: bool
) -> Training:
    model = PlainPolicy(folder, OPTIMIZER)
    steps = [
        model.update(
            batch,
            temperature=0.9,
            aggregation=aggregation,
            entropy_coefficient=entropy_coefficient,
            clips_responses=clips_responses,
        )
        for batch in _lessons(folder)
    ]
    with torch.no_grad():
        logprobs, _ = model.score(make_rows(4, seed=9), temperature=0.9)
    losses, norms = (list(column) for column in zip(*steps, strict=True))
    return Training(losses, norms, model.weights(), logprobs)


def _train(
    rank: Rank, folder: Path, case: Case, lessons: list[TrainBatch]
) -> tuple[list[Metrics], dict[str, Tensor], Tensor | None]:
    engine = rank.policy(folder, replace(ACTOR, **case.config))
    loss = replace(LOSS, entropy_coefficient=case.entropy_coefficient)
    if case.clips_responses:
        clip = {"clip_low": RESPONSE_CLIP, "clip_high": RESPONSE_CLIP}
        loss = replace(loss, policy_loss=Part.of(gspo, **clip))
    steps = []
    for batch in lessons:
        rows = to_rollouts(rows_of_rank(batch, engine, case.first))
        engine.compute_logprobs(rows, temperature=0.9)  # must not disturb anything
        steps.append(
            take_step(engine, batch, first=case.first, loss=loss, aggregation=case.aggregation)
        )
    scored = engine.compute_logprobs(to_rollouts(make_rows(4, seed=9)), temperature=0.9)
    assert engine.num_updates == len(lessons)
    return steps, weights_of(engine), scored.logprobs_BL.values() if engine.is_output_rank else None


@pytest.mark.shows("6.1")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_steps_are_those_of_the_plain_model(
    ranks: RanksUnderTest, make_model: Any, case: Case
) -> None:
    folder = make_model(ranks.layout, tie=case.tie)
    plain = _train_plainly(folder, case.aggregation, case.entropy_coefficient, case.clips_responses)
    answers = ranks.run(_train, folder, case, _lessons(folder))
    for step in range(NUM_STEPS):
        metrics = merge_metrics([answer[0][step] for answer in answers])
        loss = metrics["loss/policy"] + metrics.get("loss/entropy", 0.0)
        assert loss == pytest.approx(plain.losses[step], rel=1e-5, abs=1e-6)
        assert metrics["policy/grad_norm"] == pytest.approx(plain.grad_norms[step], rel=1e-5)
        assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (1, 0)
        assert metrics["policy/clip_low_fraction"] + metrics["policy/clip_high_fraction"] > 0
    for _, weights, logprobs in answers:
        assert weights.keys() == plain.weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor, plain.weights[name], atol=1e-5, rtol=0, msg=after(name)
            )
        assert_same_weights(answers[0][1], weights)
        if logprobs is not None:
            torch.testing.assert_close(logprobs, plain.logprobs, atol=2e-5, rtol=0)


def _count(rank: Rank, folder: Path) -> tuple[Metrics, Metrics]:
    batch = make_rows(12, num_siblings=4)
    alone = rank.policy(folder, replace(ACTOR, max_tokens_per_microbatch=1))
    whole = rank.policy(folder)
    return take_step(alone, batch, first=8), take_step(whole, batch, first=8)


def test_siblings_share_the_computation_of_their_prompt(
    ranks: RanksUnderTest, folder: Path
) -> None:
    alone, whole = (merge_metrics(list(a)) for a in zip(*ranks.run(_count, folder), strict=True))
    batch = make_rows(12, num_siblings=4)
    prompts = row_lengths(batch.token_ids_BL) - response_lengths(batch.response_mask_BL)
    num_tokens = int(row_lengths(batch.token_ids_BL).sum()) - 12
    num_spared = 0
    for share in rank_ranges(12, ranks.layout.dp_size, 8):
        families = [row // 4 for row in share]
        num_spared += sum(int(prompts[4 * f]) * (families.count(f) - 1) for f in set(families))
    assert (alone["data/microbatches"], whole["data/microbatches"]) == (12, ranks.layout.dp_size)
    assert alone["data/train_tokens"] == num_tokens
    assert whole["data/train_tokens"] == num_tokens - num_spared
    for metrics in (alone, whole):
        assert metrics["data/loss_tokens"] == int(response_lengths(batch.response_mask_BL).sum())


def _start_from_here(rank: Rank, folder: Path) -> Metrics:
    one, other = rank.policy(folder), rank.policy(folder)
    batch = rows_of_rank(make_rows(6), one, 4)
    filled = batch.clone()
    filled.old_logprobs_BL = other.compute_logprobs(to_rollouts(batch), temperature=0.9).logprobs_BL
    settings: dict[str, Any] = {
        "aggregation": TOKEN_MEAN,
        "temperature": 0.9,
        "max_response_tokens": 8,
    }
    metrics = one.update(batch, loss=LOSS, **settings)
    other.update(filled, loss=LOSS, **settings)
    assert_same_weights(weights_of(one), weights_of(other), atol=1e-6)
    return output_metrics(one, metrics)


def test_absent_old_logprobs_are_the_detached_current_ones(
    ranks: RanksUnderTest, folder: Path
) -> None:
    assert merge_metrics(ranks.run(_start_from_here, folder))["policy/ratio/mean"] == 1.0


def _fit(rank: Rank, folder: Path) -> tuple[list[Metrics], dict[str, Tensor]]:
    engine = rank.policy(folder)
    batch = to_supervised(make_rows(6))
    steps = [
        output_metrics(engine, engine.fit(rows_of_rank(batch, engine, 4))) for _ in range(NUM_STEPS)
    ]
    return steps, weights_of(engine)


def test_supervised_steps_are_those_of_the_plain_model(ranks: RanksUnderTest, folder: Path) -> None:
    model = PlainPolicy(folder, OPTIMIZER)
    expected = [model.fit(make_rows(6)) for _ in range(NUM_STEPS)]
    answers = ranks.run(_fit, folder)
    for step, (loss, norm) in enumerate(expected):
        metrics = merge_metrics([answer[0][step] for answer in answers])
        assert metrics["loss/supervised_nats"] == pytest.approx(loss, rel=1e-5)
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, tensor in model.weights().items():
        torch.testing.assert_close(answers[0][1][name], tensor, atol=1e-5, rtol=0, msg=name)
    assert expected[1][0] < expected[0][0]


def _skip(rank: Rank, folder: Path) -> list[Metrics]:
    config = with_optimizer(eps=1e-4)
    one, other = rank.policy(folder, config), rank.policy(folder, config)
    answers = []
    for seed in range(2):
        batch = make_rows(5, seed=seed)
        answers.append(take_step(one, with_nan_advantage(batch, row=4)))  # a row of the last rank
        assert one.num_updates == seed
        for engine in (one, other):
            take_step(engine, batch)
    assert one.num_updates == other.num_updates == 2
    assert_same_weights(weights_of(one), weights_of(other))
    return answers


@pytest.mark.shows("R9.6")
def test_all_ranks_skip_a_step_that_is_not_finite(ranks: RanksUnderTest, folder: Path) -> None:
    for answers in zip(*ranks.run(_skip, folder), strict=True):
        metrics = merge_metrics(list(answers))  # counted once, not once a rank
        assert (metrics["policy/skipped_updates"], metrics["policy/updates"]) == (1, 0)
        assert "policy/grad_norm" not in metrics
        assert metrics["policy/lr"] > 0


# SGD in disguise: beta1 = 0 and a huge eps make the step lr / eps * gradient.
LAZY = {"beta1": 0.0, "beta2": 0.0, "eps": 1e6, "lr": 1e6}


def _clip(rank: Rank, folder: Path, max_grad_norm: float) -> tuple[Metrics, Tensor]:
    engine = rank.policy(folder, with_optimizer(max_grad_norm=max_grad_norm, **LAZY))
    start = weights_of(engine)
    metrics = take_step(engine, make_rows(5))
    return metrics, torch.cat([(w - start[n]).flatten() for n, w in weights_of(engine).items()])


def test_gradients_are_clipped_to_the_global_norm(ranks: RanksUnderTest, folder: Path) -> None:
    answers = ranks.run(_clip, folder, 1e9)
    norm = merge_metrics([metrics for metrics, _ in answers])["policy/grad_norm"]
    assert answers[0][1].norm().item() == pytest.approx(norm, rel=1e-3)
    clipped = ranks.run(_clip, folder, norm / 4)
    before = merge_metrics([metrics for metrics, _ in clipped])["policy/grad_norm"]
    assert before == pytest.approx(norm, rel=1e-6)
    for _, change in clipped:
        assert change.norm().item() == pytest.approx(norm / 4, rel=1e-3)


def _follow(rank: Rank, folder: Path, changes: dict[str, Any]) -> tuple[list[Metrics], Tensor]:
    engine = rank.policy(folder, with_optimizer(**changes))
    steps = [take_step(engine, make_rows(4, seed=seed)) for seed in range(3)]
    norm_weight = weights_of(engine)["model.norm.weight"]
    return steps, norm_weight


def test_the_learning_rate_follows_its_schedule(ranks: RanksUnderTest, folder: Path) -> None:
    changes = {"schedule": "cosine", "num_warmup_steps": 1, "lr": 0.1, "min_lr_ratio": 0.2}
    optimizer = with_optimizer(**changes).optimizer
    answers = ranks.run(_follow, folder, changes)
    for step in range(3):
        rate = merge_metrics([steps[step] for steps, _ in answers])["policy/lr"]
        assert rate == pytest.approx(learning_rate(optimizer, step=step, num_total_steps=10))


def _decay(rank: Rank, folder: Path) -> dict[str, Tensor]:
    # The gradient moves nothing beside an eps of 1e12; what is left is the decay, lr * 0.1.
    engine = rank.policy(folder, with_optimizer(weight_decay=0.1, eps=1e12))
    take_step(engine, make_rows(4))
    return weights_of(engine)


def test_matrices_decay_and_vectors_do_not(ranks: RanksUnderTest, make_model: Any) -> None:
    folder = make_model(ranks.layout, tie=False)
    before = PlainPolicy(folder, OPTIMIZER).model.state_dict()
    decayed = ranks.run(_decay, folder)[0]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(decayed[name], 0.95 * before[name], atol=1e-6, rtol=0)
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        torch.testing.assert_close(decayed[name], before[name], atol=1e-6, rtol=0)


def _compute_in_bfloat16(rank: Rank, folder: Path) -> None:
    config = replace(with_optimizer(lr=0.05), compute_dtype="bfloat16")
    engine, exact = rank.policy(folder, config), rank.policy(folder)
    rollouts = to_rollouts(make_rows(5))
    one, other = (e.compute_logprobs(rollouts, temperature=1.0) for e in (engine, exact))
    assert one.logprobs_BL.values().dtype == torch.float32
    torch.testing.assert_close(
        one.logprobs_BL.values(), other.logprobs_BL.values(), atol=0.15, rtol=0
    )
    before = copy_state(engine)
    take_step(engine, make_rows(5))
    assert_float32_learns(before, copy_state(engine))


def test_bfloat16_computes_and_float32_is_kept(ranks: RanksUnderTest, folder: Path) -> None:
    ranks.run(_compute_in_bfloat16, folder)
