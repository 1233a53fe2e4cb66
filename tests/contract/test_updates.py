from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.batch import response_lengths, row_lengths
from hybridrl.metrics import Metrics
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.optimizer import learning_rate
from tests.contract.layouts import on_layouts
from tests.contract.plain import PlainPolicy
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
from tests.contract.steps import Case, assert_steps, check_two_steps, merged_steps
from tests.workers.train.engines import (
    ACTOR,
    LOSS,
    OPTIMIZER,
    assert_same_weights,
    make_rows,
    to_rollouts,
    to_supervised,
    weights_of,
    with_nan_advantage,
    with_optimizer,
)

pytestmark = on_layouts(compares_numbers=True)

CASES = {
    "one micro-batch": Case(),
    "many micro-batches": Case(config={"max_tokens_per_microbatch": 30}),
    "a rank without rows": Case(config={"max_tokens_per_microbatch": 30}, first=11, tie=False),
    "activations computed again": Case(
        config={"max_tokens_per_microbatch": 30, "gradient_checkpointing": True}
    ),
    "every prompt the same": Case(aggregation="prompt_mean_token_mean", first=6, tie=False),
    "the ratio of whole responses": Case(
        config={"max_tokens_per_microbatch": 30},
        aggregation="sequence_mean_token_mean",
        clips_responses=True,
    ),
    "an entropy bonus": Case(
        config={"max_tokens_per_microbatch": 30}, entropy_coefficient=0.1, tie=False
    ),
    "an entropy bonus among the tokens that were left": Case(
        entropy_coefficient=0.1, tie=False, has_masks=True
    ),
    "conversations with rewritten histories": Case(
        config={"max_tokens_per_microbatch": 400}, entropy_coefficient=0.1, has_turns=True
    ),
}


@pytest.mark.shows("6.1")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_steps_are_those_of_the_plain_model(
    ranks: RanksUnderTest, make_model: Any, case: Case
) -> None:
    check_two_steps(ranks, make_model(ranks.layout, tie=case.tie), case)


def _count(rank: Rank, folder: Path) -> tuple[Metrics, Metrics]:
    batch = make_rows(12, num_siblings=4)
    alone = rank.policy(folder, replace(ACTOR, max_tokens_per_microbatch=1))
    whole = rank.policy(folder)
    return take_step(alone, batch, first=8), take_step(whole, batch, first=8)


def test_siblings_share_the_computation_of_their_prompt(
    ranks: RanksUnderTest, folder: Path
) -> None:
    alone, whole = merged_steps(ranks.run(_count, folder))
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


def trusting(current_logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """A loss of the user's, that detaches nothing."""
    return -(current_logprobs_T - old_logprobs_T).exp() * advantages_T


def _start_from_here(rank: Rank, folder: Path) -> Metrics:
    one, other = rank.policy(folder), rank.policy(folder)
    batch = rows_of_rank(make_rows(6), one, 4)
    filled = batch.clone()
    filled.old_logprobs_BL = other.compute_logprobs(to_rollouts(batch), temperature=0.9).logprobs_BL
    settings: dict[str, Any] = {
        "loss": replace(LOSS, policy_loss=Part.of(trusting)),
        "aggregation": TOKEN_MEAN,
        "temperature": 0.9,
        "max_response_tokens": 8,
    }
    metrics = one.update(batch, **settings)
    other.update(filled, **settings)
    assert_same_weights(weights_of(one), weights_of(other), atol=1e-6)
    return output_metrics(one, metrics)


def test_absent_old_logprobs_are_the_detached_current_ones(
    ranks: RanksUnderTest, folder: Path
) -> None:
    assert merge_metrics(ranks.run(_start_from_here, folder))["policy/ratio/mean"] == 1.0


def _fit(rank: Rank, folder: Path) -> tuple[list[Metrics], dict[str, Tensor]]:
    engine = rank.policy(folder)
    rows = rows_of_rank(to_supervised(make_rows(6)), engine, 4)
    return [output_metrics(engine, engine.fit(rows)) for _ in range(2)], weights_of(engine)


def test_supervised_steps_are_those_of_the_plain_model(ranks: RanksUnderTest, folder: Path) -> None:
    model = PlainPolicy(folder, OPTIMIZER)
    expected = [model.fit(make_rows(6)) for _ in range(2)]
    answers = ranks.run(_fit, folder)
    assert_steps([steps for steps, _ in answers], expected, loss="loss/supervised_nats")
    assert_same_weights(answers[0][1], model.weights(), atol=1e-5)
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
    for metrics in merged_steps(ranks.run(_skip, folder)):  # counted once, not once a rank
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


def _follow(rank: Rank, folder: Path, changes: dict[str, Any]) -> list[Metrics]:
    engine = rank.policy(folder, with_optimizer(**changes))
    return [take_step(engine, make_rows(4, seed=seed)) for seed in range(3)]


def test_the_learning_rate_follows_its_schedule(ranks: RanksUnderTest, folder: Path) -> None:
    changes = {"schedule": "cosine", "num_warmup_steps": 1, "lr": 0.1, "min_lr_ratio": 0.2}
    optimizer = with_optimizer(**changes).optimizer
    for step, metrics in enumerate(merged_steps(ranks.run(_follow, folder, changes))):
        expected = learning_rate(optimizer, step=step, num_total_steps=10)
        assert metrics["policy/lr"] == pytest.approx(expected)


def _decay(rank: Rank, folder: Path) -> dict[str, Tensor]:
    # The gradient moves nothing beside an eps of 1e12; what is left is the decay, lr * 0.1. The
    # first of two steps up to the full rate has half of it.
    config = with_optimizer(weight_decay=0.1, eps=1e12, num_warmup_steps=1)
    engine = rank.policy(folder, config)
    take_step(engine, make_rows(4))
    return weights_of(engine)


def test_matrices_decay_by_the_rate_of_the_step_and_vectors_do_not(
    ranks: RanksUnderTest, make_model: Any
) -> None:
    folder = make_model(ranks.layout, tie=False)
    before = PlainPolicy(folder, OPTIMIZER).model.state_dict()
    decayed = ranks.run(_decay, folder)[0]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        torch.testing.assert_close(decayed[name], 0.975 * before[name], atol=1e-6, rtol=0)
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
