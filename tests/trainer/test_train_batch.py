"""The rows that an update learns from, and the weights of their tokens."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.rollout_correction import importance
from hybridrl.batch import LogprobBatch, TrainBatch, jagged
from hybridrl.errors import TrainingError
from hybridrl.trainer.batches import ScoredRollouts
from hybridrl.trainer.build_algorithm import with_time_limit
from hybridrl.trainer.collect import Collected
from hybridrl.trainer.train_batch import TrainBatches
from tests.trainer.rollouts import rollouts_of, scores_of

MASK_BL = jagged([torch.tensor([False, *[True] * n]) for n in (2, 1, 3, 1)])
OLD_BL = jagged([torch.tensor(row) for row in ([0.0, 0, 1], [0.0, 0], [0.0, 9, 0, 0], [0.0, 0])])
LOGPROBS = LogprobBatch(old_logprobs_BL=OLD_BL, batch_size=[4])


def batch_of(
    *, is_kept: list[bool] | None = None, logprobs: LogprobBatch = LOGPROBS, **settings: Any
) -> TrainBatch:
    """Two prompts with two responses each, of 2, 1, 3 and 1 tokens; the third is truncated."""
    rollouts = rollouts_of(
        [torch.arange(len(row)) for row in MASK_BL.unbind()],
        MASK_BL.unbind(),
        [5, 5, 8, 8],
        is_truncated_B=torch.tensor([False, False, True, False]),
    )
    nothing: Any = None
    scored = ScoredRollouts(nothing, rollouts, scores_of([0.0, 1.0, 1.0, 0.5]))
    kept_B = torch.tensor([True] * 4 if is_kept is None else is_kept)
    plain: dict[str, Any] = {"mask_truncated": False, "correction": None, "counts_groups": False}
    batches = TrainBatches(dp_size=1, num_minibatches=1, **(plain | settings))
    collected = Collected(everything=scored, batch=scored, is_kept_B=kept_B)
    return batches(collected, logprobs, torch.ones_like(OLD_BL))


def rows(column_BL: Tensor | None) -> list[list[float]]:
    assert column_BL is not None
    return [row.tolist() for row in column_BL.unbind()]


def test_rows_left_out_keep_tokens_and_have_an_empty_mask() -> None:
    batch = batch_of(is_kept=[True, True, False, False])
    assert [sum(row) for row in rows(batch.response_mask_BL)] == [2, 1, 0, 0]
    assert [len(row) for row in rows(batch.token_ids_BL)] == [3, 2, 4, 2]
    truncated = batch_of(mask_truncated=True)
    assert [sum(row) for row in rows(truncated.response_mask_BL)] == [2, 1, 0, 1]


def keep_good(rewards_B: Tensor, is_truncated_B: Tensor) -> Tensor:
    return (rewards_B > 0) & ~is_truncated_B


def keep_first_token(response_mask_BL: Tensor) -> Tensor:
    return jagged([torch.arange(len(row)) < 2 for row in response_mask_BL.unbind()])


@pytest.mark.shows("4.17")
def test_a_filter_takes_rows_or_tokens_out_of_the_loss() -> None:
    batch = batch_of(row_filter=Part.of(keep_good))
    assert [sum(row) for row in rows(batch.response_mask_BL)] == [0, 1, 0, 1]
    assert [len(row) for row in rows(batch.token_ids_BL)] == [3, 2, 4, 2]
    batch = batch_of(row_filter=Part.of(keep_first_token), is_kept=[True, True, True, False])
    assert [sum(row) for row in rows(batch.response_mask_BL)] == [1, 1, 1, 0]


@pytest.mark.shows("4.17")
@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "returned a NoneType"),
        (torch.ones(4), r"returned float32 \[4\]"),
        (torch.ones(3, dtype=torch.bool), r"returned bool \[3\], and a row filter .*bool \[4\]"),
        (jagged([torch.ones(2, dtype=torch.bool)] * 4), "8 tokens in 4 rows"),
    ],
)
def test_a_filter_that_returns_something_else_is_named(returned: object, told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        batch_of(row_filter=Part("algorithm.row_filter", "f.py:f", (), lambda: returned))


@pytest.mark.shows("4.17")
def test_a_function_of_the_user_that_hangs_ends_the_step_by_name() -> None:
    def hang() -> None:
        while True:
            pass

    former = signal.getsignal(signal.SIGALRM)
    part = Part("algorithm.row_filter", "f.py:hang", (), hang)
    with pytest.raises(TrainingError, match=r"row_filter=f\.py:hang took longer than cluster"):
        batch_of(row_filter=with_time_limit(part, timeout_s=0.05))
    assert signal.getsignal(signal.SIGALRM) == former


def test_a_correction_weighs_kept_rows_and_masks_rejected_tokens() -> None:
    rejecting = Part.of(importance, reject="token_k2 <= 1")
    batch = batch_of(is_kept=[True, True, True, False], correction=rejecting)
    assert rows(batch.sampler_weights_BL)[:2] == [[0.0, 1.0, 2.0], [0.0, 1.0]]  # e is truncated
    assert rows(batch.response_mask_BL)[2] == [False, False, True, True]  # 9 nats apart
    assert rows(batch.sampler_weights_BL)[2] == [0.0, 0.0, 1.0, 1.0]
    assert rows(batch.sampler_weights_BL)[3] == [0.0, 0.0]


def test_a_mean_weight_is_taken_over_the_rows_that_are_learned() -> None:
    normalized = Part.of(importance, high=1e6, normalize=True)
    batch = batch_of(is_kept=[True, True, False, False], correction=normalized)
    weights = [weight for row in rows(batch.sampler_weights_BL)[:2] for weight in row if weight]
    assert sum(weights) / 3 == pytest.approx(1.0)


def test_groups_count_the_tokens_and_rows_that_are_learned() -> None:
    batch = batch_of(is_kept=[True, True, True, False], counts_groups=True)
    assert batch.group_tokens_B is not None
    assert batch.group_rows_B is not None
    assert batch.group_tokens_B.tolist() == [3, 3, 3, 3]
    assert batch.group_rows_B.tolist() == [2, 2, 1, 0]


def test_a_correction_without_old_log_probs_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"set algorithm\.old_logprobs=recompute"):
        batch_of(correction=Part.of(importance), logprobs=LogprobBatch(batch_size=[4]))
