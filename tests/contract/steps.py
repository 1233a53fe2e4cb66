"""Optimizer steps of a policy on ranks, held against those of the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.sequence import gspo
from hybridrl.batch import TrainBatch, jagged_from, response_lengths, row_lengths
from hybridrl.metrics import Metrics
from tests.contract.plain import RESPONSE_CLIP, PlainPolicy
from tests.contract.ranks_under_test import (
    Rank,
    RanksUnderTest,
    merge_metrics,
    rows_of_rank,
    take_step,
)
from tests.workers.train.engines import (
    ACTOR,
    LOSS,
    OPTIMIZER,
    add_masks,
    assert_same_weights,
    make_conversations,
    make_rows,
    rows_of,
    to_rollouts,
    weights_of,
)

NUM_STEPS = 2
PROMPT_B = torch.arange(11) // 4


@dataclass(frozen=True)
class Case:
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    first: int = 8
    """Rows of the first of two data-parallel ranks, of eleven."""
    aggregation: str = "token_mean"
    entropy_coefficient: float = 0.0
    clips_responses: bool = False
    tie: bool = True
    has_masks: bool = False
    """Of sampling."""
    has_turns: bool = False
    """Rows are conversations whose history was rewritten, and siblings share their first turn."""


def merged_steps(by_rank: Sequence[Sequence[Metrics]]) -> list[dict[str, float]]:
    return [merge_metrics(list(of_step)) for of_step in zip(*by_rank, strict=True)]


def assert_steps(
    by_rank: Sequence[Sequence[Metrics]],
    expected: Sequence[tuple[float, float]],
    *,
    loss: str = "loss/policy",
    norm: str = "policy/grad_norm",
    rel: float = 1e-5,
    rel_of_norm: float | None = None,
) -> list[dict[str, float]]:
    steps = merged_steps(by_rank)
    for metrics, (of_loss, of_gradient) in zip(steps, expected, strict=True):
        assert metrics[loss] == pytest.approx(of_loss, rel=rel, abs=1e-6)
        assert metrics[norm] == pytest.approx(of_gradient, rel=rel_of_norm or rel)
    return steps


@cache
def _lessons(
    folder: Path, has_masks: bool = False, has_turns: bool = False
) -> list[tuple[TrainBatch, TrainBatch]]:
    """Eleven rows a step, whose prompts are shared by up to four, some ratios beyond the clip.

    The second of each pair is for the plain model, which knows one sequence a row.
    """
    model = PlainPolicy(folder, OPTIMIZER)
    lessons = []
    for seed in range(NUM_STEPS):
        if has_turns:
            together, apart = make_conversations(12, seed=seed)
            batch, plain = rows_of(together, range(11)), rows_of(apart, range(44))
        else:
            rows = make_rows(12, seed=seed, num_siblings=4)
            batch = plain = rows_of(add_masks(rows) if has_masks else rows, range(11))
            lengths_B, groups = response_lengths(batch.response_mask_BL), Groups.of(PROMPT_B)
            batch.group_tokens_B, batch.group_rows_B = groups.sum(lengths_B).long(), groups.sizes_B
        with torch.no_grad():
            logprobs, _ = model.score(plain, temperature=0.9)
        noise = 0.3 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(seed))
        old = (logprobs + noise) * batch.response_mask_BL.values()
        for each in (batch, plain):
            each.old_logprobs_BL = jagged_from(old, row_lengths(each.token_ids_BL))
        lessons.append((batch, plain))
    return lessons


@cache
def _train_plainly(
    folder: Path,
    aggregation: str,
    entropy_coefficient: float,
    clips_responses: bool,
    has_masks: bool,
    has_turns: bool,
) -> tuple[list[tuple[float, float]], dict[str, Tensor], Tensor]:
    model = PlainPolicy(folder, OPTIMIZER)
    steps = [
        model.update(
            batch,
            temperature=0.9,
            aggregation=aggregation,
            entropy_coefficient=entropy_coefficient,
            clips_responses=clips_responses,
        )
        for _, batch in _lessons(folder, has_masks, has_turns)
    ]
    with torch.no_grad():
        logprobs, _ = model.score(make_rows(4, seed=9), temperature=0.9)
    return steps, model.weights(), logprobs


Learned = tuple[list[Metrics], dict[str, Tensor], Tensor | None]


def _train(
    rank: Rank, folder: Path, case: Case, lessons: list[TrainBatch], target: Path | None
) -> Learned:
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
    if target is not None:
        engine.export_hf(target)
    return steps, weights_of(engine), scored.logprobs_BL.values() if engine.is_output_rank else None


def check_two_steps(
    ranks: RanksUnderTest,
    folder: Path,
    case: Case,
    *,
    target: Path | None = None,
    rel: float = 1e-5,
) -> dict[str, Tensor]:
    """Compare steps, scores and weights, which are written to ``target``, too; return these."""
    own = (case.aggregation, case.entropy_coefficient, case.clips_responses)
    rows = (case.has_masks, case.has_turns)
    expected, weights, scores = _train_plainly(folder, *own, *rows)
    lessons = [batch for batch, _ in _lessons(folder, *rows)]
    answers: list[Learned] = ranks.run(_train, folder, case, lessons, target)
    for metrics, (loss, norm) in zip(merged_steps([a[0] for a in answers]), expected, strict=True):
        total = metrics["loss/policy"] + metrics.get("loss/entropy", 0.0)
        assert total == pytest.approx(loss, rel=rel, abs=1e-6)
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=rel)
        assert (metrics["policy/updates"], metrics["policy/skipped_updates"]) == (1, 0)
        assert metrics["policy/clip_low_fraction"] + metrics["policy/clip_high_fraction"] > 0
    for _, learned, scored in answers:
        assert_same_weights(learned, weights, atol=1e-5)
        assert_same_weights(answers[0][1], learned)
        if scored is not None:
            torch.testing.assert_close(scored, scores, atol=2e-5, rtol=0)
    return answers[0][1]
