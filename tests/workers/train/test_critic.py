"""What holds for the critic's engine, on one rank and on two."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForTokenClassification

from hybridrl.batch import CriticBatch, jagged_from, row_lengths
from hybridrl.errors import DataError, PhaseError
from hybridrl.metrics import Metrics, merge
from hybridrl.workers.train.critic import FSDP2Critic
from hybridrl.workers.train.protocol import TrainState
from tests.models import Family, make_tiny_model
from tests.ranks import run_ranks
from tests.workers.train.critics import CRITIC, build_critic, make_lessons, with_optimizer
from tests.workers.train.engines import (
    assert_same_weights,
    make_rows,
    rows_of,
    to_rollouts,
    weights_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def taught(engine: FSDP2Critic, *, num_steps: int = 2) -> FSDP2Critic:
    """Give the head, which begins as zeros, something to say."""
    for seed in range(num_steps):
        engine.update(make_lessons(6, seed=seed + 50))
    return engine


def values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_values_are_0_before_anything_was_learnt_and_the_body_is_the_policys(
    tmp_path: Path, family: Family, tie_embeddings: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", family, tie_embeddings=tie_embeddings)
    engine = build_critic(folder)
    assert not engine.compute_values(to_rollouts(make_rows(5))).values_BL.values().any()
    body = AutoModel.from_pretrained(folder).state_dict()
    weights = weights_of(engine)
    assert {*weights} == {*(f"model.{name}" for name in body), "score.weight", "score.bias"}
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in body.items())


@pytest.mark.parametrize("num_siblings", [1, 6])
def test_a_value_is_of_the_state_before_its_token(
    folder: Path, tmp_path: Path, num_siblings: int
) -> None:
    engine = taught(build_critic(folder))
    engine.export_hf(tmp_path / "critic")
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic").eval()
    batch = make_rows(12, num_siblings=num_siblings)
    computed = engine.compute_values(to_rollouts(batch)).values_BL
    columns = (batch.token_ids_BL, batch.response_mask_BL, computed)
    for tokens, mask, row in zip(*(column.unbind() for column in columns), strict=True):
        expected = torch.zeros(len(tokens))
        with torch.no_grad():
            expected[1:] = plain(tokens[None]).logits[0, :-1, 0]
        torch.testing.assert_close(row, expected * mask, atol=1e-5, rtol=0)
        # The token itself must not be seen: else the value would know the action it judges.
        unseen = tokens.clone()
        unseen[-1] = (unseen[-1] + 1) % 64
        with torch.no_grad():
            before = plain(unseen[None]).logits[0, -2, 0]
        assert float(row[-1]) == pytest.approx(float(before), abs=1e-5)
    assert computed.values().any()


@pytest.mark.parametrize("num_siblings", [1, 4])
def test_an_update_does_not_depend_on_microbatches_nor_on_row_order(
    folder: Path, num_siblings: int
) -> None:
    whole = build_critic(folder)
    parts = build_critic(folder, config=replace(CRITIC, max_tokens_per_microbatch=25))
    single = build_critic(folder, config=replace(CRITIC, max_tokens_per_microbatch=1))
    order = torch.randperm(12, generator=torch.manual_seed(1))
    for seed in range(3):
        batch = make_lessons(12, seed=seed, num_siblings=num_siblings)
        one = values(whole.update(batch))
        for engine in (parts, single):
            other = values(engine.update(batch[order]))
            assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
    assert_same_weights(weights_of(whole), weights_of(parts), atol=2e-6)
    assert_same_weights(weights_of(whole), weights_of(single), atol=2e-6)


def test_the_gradient_is_that_of_the_mean_squared_error_over_response_tokens(folder: Path) -> None:
    # SGD in disguise: beta1 = 0 and a huge eps make the step lr / eps * gradient.
    engine = taught(
        build_critic(folder, config=with_optimizer(beta1=0.0, beta2=0.0, eps=1e6, lr=1e6))
    )
    model, batch = engine.model, make_lessons(7, num_siblings=7)
    before = weights_of(engine)
    total = torch.zeros(())
    columns = (batch.token_ids_BL, batch.response_mask_BL, batch.returns_BL)
    plain = AutoModelForTokenClassification.from_config(
        deepcopy(model.hf.config), attn_implementation="eager", dtype=torch.float32
    ).eval()
    plain.load_state_dict(before)
    for tokens, mask, returns in zip(*(column.unbind() for column in columns), strict=True):
        logits = plain(tokens[None]).logits[0, :-1, 0]
        total = total + ((logits - returns[1:]).square() / 2)[mask[1:]].sum()
    (total / batch.response_mask_BL.values().sum()).backward()
    metrics = values(engine.update(batch))
    expected = total.item() / int(batch.response_mask_BL.values().sum())
    assert metrics["loss/value"] == pytest.approx(expected, rel=1e-5)
    for name, parameter in plain.named_parameters():
        moved = before[name] - weights_of(engine)[name]
        torch.testing.assert_close(moved, parameter.grad, atol=2e-5, rtol=1e-3)


def test_a_critic_learns_its_returns(folder: Path) -> None:
    engine = build_critic(folder, config=with_optimizer(lr=0.01, eps=1e-8))
    batch = make_lessons(6)
    losses = [engine.update(batch)["loss/value"].value for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    learnt = engine.compute_values(to_rollouts(make_rows(6))).values_BL.values()
    mask = batch.response_mask_BL.values()
    missed = (learnt - batch.returns_BL.values())[mask]
    assert float(missed.square().mean()) < 0.2 * float(batch.returns_BL.values()[mask].var())


def test_a_value_stops_at_the_clip_within_a_step(folder: Path) -> None:
    config = replace(with_optimizer(lr=0.01, eps=1e-8), value_clip=0.2)
    engine = build_critic(folder, config=config)
    batch = make_lessons(6)
    batch.old_values_BL = jagged_from(
        torch.zeros(batch.old_values_BL.values().shape), row_lengths(batch.old_values_BL)
    )
    fractions = [engine.update(batch)["critic/clip_fraction"].value for _ in range(40)]
    assert fractions[0] == 0.0
    assert fractions[-1] > 0.4
    far = engine.compute_values(to_rollouts(make_rows(6))).values_BL.values().abs()
    assert float(far.median()) < 0.4  # without a clip they follow their returns, of deviation 1


def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_trace(folder: Path) -> None:
    one, other = build_critic(folder), build_critic(folder)
    for seed in range(2):
        batch = make_lessons(5, seed=seed)
        spoiled = batch.clone()
        spoiled.returns_BL = jagged_from(
            batch.returns_BL.values() * torch.nan, row_lengths(batch.returns_BL)
        )
        skipped = values(one.update(spoiled))
        assert (skipped["critic/skipped_updates"], skipped["critic/updates"]) == (1, 0)
        for engine in (one, other):
            assert values(engine.update(batch))["critic/updates"] == 1
    assert_same_weights(weights_of(one), weights_of(other))


def test_an_offloaded_critic_refuses_to_work_and_comes_back_bit_by_bit(folder: Path) -> None:
    resting, steady = build_critic(folder), build_critic(folder)
    for seed in range(3):
        resting.update(make_lessons(4, seed=seed))
        steady.update(make_lessons(4, seed=seed))
        assert resting.resident_bytes(TrainState.OPTIMIZER) > 0
        for part in TrainState:
            resting.offload(part)
            assert resting.resident_bytes(part) == 0
        with pytest.raises(PhaseError, match=r"compute_values\(\) needs parameters"):
            resting.compute_values(to_rollouts(make_rows(2)))
        with pytest.raises(PhaseError, match=r"update\(\) needs"):
            resting.update(make_lessons(2))
        for part in TrainState:
            resting.restore(part)
    assert_same_weights(weights_of(resting), weights_of(steady))
    assert resting.optimizer.num_steps == 3


def test_a_row_that_begins_with_a_response_token_is_refused(folder: Path) -> None:
    batch = make_lessons(3)
    everywhere = torch.ones_like(batch.response_mask_BL.values())
    batch.response_mask_BL = jagged_from(everywhere, row_lengths(batch.token_ids_BL))
    with pytest.raises(DataError, match="row 0 of the batch begins with a response token"):
        build_critic(folder).update(batch)


# Rank 1 gets few rows: fewer micro-batches than rank 0.
SPLIT = (range(0, 8), range(8, 11))


def _train(
    rank: int, folder: Path, split: tuple[range, ...], changes: dict[str, Any]
) -> tuple[list[Metrics], dict[str, Tensor], Tensor]:
    config = replace(CRITIC, max_tokens_per_microbatch=30, value_clip=0.5, **changes)
    engine = build_critic(folder, config=config)
    steps = []
    for seed in range(3):
        lessons: CriticBatch = rows_of(make_lessons(12, seed=seed, num_siblings=4), split[rank])
        steps.append(engine.update(lessons))
        engine.compute_values(to_rollouts(make_rows(2 + rank)))  # must not disturb anything
    scored = engine.compute_values(to_rollouts(make_rows(4, seed=9)))
    return steps, weights_of(engine), scored.values_BL.values()


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}])
def test_two_ranks_learn_what_one_does_however_rows_fall_on_them(
    folder: Path, changes: dict[str, Any]
) -> None:
    alone_steps, alone_weights, alone_values = _train(0, folder, (range(0, 11),), changes)
    ranks = run_ranks(2, _train, folder, SPLIT, changes)
    for step, alone in enumerate(alone_steps):
        together = merge(answer[0][step] for answer in ranks)
        assert values(together) == pytest.approx(values(alone), rel=3e-6, abs=1e-7)
    for _, weights, scores in ranks:
        assert_same_weights(alone_weights, weights, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(alone_values, scores, atol=1e-5, rtol=0)


def _compute_in_bfloat16(rank: int, folder: Path) -> None:
    engine = build_critic(folder, config=replace(CRITIC, compute_dtype="bfloat16"))
    before = weights_of(engine)
    for seed in range(2):
        engine.update(make_lessons(4, seed=seed + rank))
    scored = engine.compute_values(to_rollouts(make_rows(3))).values_BL.values()
    assert scored.dtype == torch.float32
    assert scored.any()
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.float32}
    assert all(bool((w != before[n]).any()) for n, w in weights_of(engine).items())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bfloat16_computes_and_float32_is_kept(folder: Path, num_ranks: int) -> None:
    run_ranks(num_ranks, _compute_in_bfloat16, folder)
