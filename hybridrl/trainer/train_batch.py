"""From the responses of a step to the batches of the updates. Legend: B rows, L tokens of a row."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hybridrl.algorithms.groups import Groups
from hybridrl.algorithms.load import Part
from hybridrl.algorithms.rollout_correction import SamplerCorrection
from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.batch import (
    CriticBatch,
    LogprobBatch,
    RolloutBatch,
    TrainBatch,
    jagged_from,
    response_lengths,
    row_lengths,
    without_rows,
)
from hybridrl.errors import DispatchError, TrainingError
from hybridrl.trainer.advantages import Targets
from hybridrl.trainer.collect import Collected, describe_result

Rows = TypeVar("Rows", TrainBatch, CriticBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatches:
    """Builds the batches of the policy's updates."""

    dp_size: int  # data-parallel ranks that learn
    num_minibatches: int
    mask_truncated: bool  # do not learn from responses that the length limit ended
    # weighs tokens that trainer and sampler find unequally likely; None if the loss does
    correction: Part | None
    counts_groups: bool  # whether the aggregation asks for the tokens of a row's group
    row_filter: Part | None = None  # takes responses, or tokens of them, out of the loss

    def __call__(
        self, collected: Collected, logprobs: LogprobBatch, advantages_BL: Tensor
    ) -> TrainBatch:
        """Build the batch of the step's updates, rows in the order of ranks and mini-batches.

        Rows that are not learned from keep their tokens and have an empty response mask.
        """
        rollouts = collected.rollouts
        mask_BL = without_rows(rollouts.response_mask_BL, ~collected.is_kept_B)
        if self.mask_truncated:
            mask_BL = without_rows(mask_BL, rollouts.is_truncated_B)
        if self.row_filter is not None:
            mask_BL = filter_rows(self.row_filter, collected, mask_BL)
        batch = build_train_batch(rollouts, logprobs, advantages_BL)
        batch.response_mask_BL = mask_BL
        if self.correction is not None:
            batch = correct_for_sampler(self.correction, batch)
        if self.counts_groups:
            lengths_B = response_lengths(batch.response_mask_BL)
            groups = Groups.of(rollouts.prompt_index_B)
            batch.group_tokens_B = groups.sum(lengths_B).long()
            batch.group_rows_B = groups.sum(lengths_B > 0).long() * (lengths_B > 0)
        return balance(batch, dp_size=self.dp_size, num_minibatches=self.num_minibatches)


def filter_rows(part: Part, collected: Collected, mask_BL: Tensor) -> Tensor:
    """Take what a function of the user leaves out of the loss; rewards stay in their groups.

    Raises:
        TrainingError: it raised, took too long, or returned neither bool [B] nor jagged [B, L].
    """
    rollouts = collected.rollouts
    keep = part(
        rewards_B=collected.batch.scores.rewards_B,
        group_B=rollouts.prompt_index_B,
        response_lengths_B=response_lengths(rollouts.response_mask_BL),
        is_truncated_B=rollouts.is_truncated_B,
        token_ids_BL=rollouts.token_ids_BL,
        response_mask_BL=rollouts.response_mask_BL,
        sampler_logprobs_BL=rollouts.sampler_logprobs_BL,
    )
    size, lengths_B = len(rollouts), row_lengths(mask_BL)
    if isinstance(keep, Tensor) and keep.dtype == torch.bool:
        if not keep.is_nested and keep.shape == (size,):
            return without_rows(mask_BL, ~keep)
        if keep.is_nested and torch.equal(row_lengths(keep), lengths_B):
            return jagged_from(keep.values() & mask_BL.values(), lengths_B)
    raise TrainingError(
        f"{part.key}={part.spelled} returned {describe_result(keep)}, and a row filter returns "
        f"bool [{size}], True for each row to learn from, or a jagged bool with the row lengths "
        "of response_mask_BL, True for each token"
    )


def build_train_batch(
    rollouts: RolloutBatch, logprobs: LogprobBatch, advantages_BL: Tensor
) -> TrainBatch:
    """Build the batch of an update that learns from all rows, in their order."""
    of_both = [name for name in TrainBatch.__annotations__ if name in RolloutBatch.__annotations__]
    return TrainBatch(
        **{name: getattr(rollouts, name) for name in of_both},
        advantages_BL=advantages_BL,
        old_logprobs_BL=logprobs.old_logprobs_BL,
        reference_logprobs_BL=logprobs.reference_logprobs_BL,
        batch_size=[len(rollouts)],
    )


def build_critic_batch(
    rollouts: RolloutBatch, values_BL: Tensor, targets: Targets, *, is_kept_B: Tensor | None = None
) -> CriticBatch:
    """Build the batch of the critic's update; raises TrainingError if there are no returns.

    ``is_kept_B`` are the rows to learn from, None is all: the masks of others are empty.
    """
    if targets.returns_BL is None:
        raise TrainingError("a critic learns from returns, and the advantage gave none")
    mask_BL = rollouts.response_mask_BL
    return CriticBatch(
        token_ids_BL=rollouts.token_ids_BL,
        response_mask_BL=mask_BL if is_kept_B is None else without_rows(mask_BL, ~is_kept_B),
        old_values_BL=values_BL,
        returns_BL=targets.returns_BL,
        sequence_lengths_BQ=rollouts.sequence_lengths_BQ,
        batch_size=[len(rollouts)],
    )


def balance(batch: Rows, *, dp_size: int, num_minibatches: int) -> Rows:
    """Order rows so that ranks compute about as many tokens in each mini-batch, and few.

    A rank computes the prompt of a group once. Rows that are not learned from are not computed.
    """
    if dp_size == 1:
        _require_even_shares(len(batch), dp_size, num_minibatches)
        return batch
    lengths, prompts = [], []
    images_B = batch.images_B if isinstance(batch, TrainBatch) else None
    rows = zip(
        batch.token_ids_BL.unbind(),
        batch.response_mask_BL.unbind(),
        [()] * len(batch) if images_B is None else images_B,
        strict=True,
    )
    for tokens_L, mask_L, images in rows:
        (index_S,) = mask_L.nonzero(as_tuple=True)
        prompt_L = tokens_L[: int(index_S[0]) if len(index_S) else 0]
        if images:  # other ones may have the same tokens
            prompt_L = prompt_L + hash(tuple(image.identity for image in images))
        lengths.append(len(tokens_L) if len(index_S) else 0)
        prompts.append(prompt_L.numpy().tobytes())
    order = balance_over_ranks(
        lengths, dp_size=dp_size, num_minibatches=num_minibatches, prompts_B=prompts
    )
    return batch if order == list(range(len(batch))) else batch[order]


def correct_for_sampler(part: Part, batch: TrainBatch) -> TrainBatch:
    """Give each token its weight, and take rejected tokens out of the response mask."""
    if batch.old_logprobs_BL is None:
        raise TrainingError(
            "algorithm.rollout_correction compares old log-probs with the sampler's, and the batch "
            "has none; set algorithm.old_logprobs=recompute"
        )
    mask_T, lengths_B = batch.response_mask_BL.values(), row_lengths(batch.token_ids_BL)
    index_S = mask_T.nonzero()[:, 0]
    row_T = torch.repeat_interleave(torch.arange(len(batch)), lengths_B)
    correction: SamplerCorrection = part(
        old_logprobs_T=batch.old_logprobs_BL.values()[index_S],
        sampler_logprobs_T=batch.sampler_logprobs_BL.values()[index_S],
        rows=TokenRows.on_one_rank(row_T[index_S], len(batch)),
    )
    weights_T, kept_T = torch.zeros(len(mask_T)), torch.zeros_like(mask_T)
    weights_T[index_S], kept_T[index_S] = correction.weights_T, correction.keep_T
    batch.sampler_weights_BL = jagged_from(weights_T, lengths_B)
    batch.response_mask_BL = jagged_from(kept_T, lengths_B)
    return batch


def balance_over_ranks(
    lengths_B: Sequence[int], *, dp_size: int, num_minibatches: int, prompts_B: Sequence[bytes] = ()
) -> list[int]:
    """Order rows so that all ranks get equally many rows, and the last to end has few tokens.

    Mini-batch m begins at row ``m * B / num_minibatches``, whatever ``dp_size`` is. So the rows of
    an optimizer step do not depend on the number of ranks. Within it the next longest row goes to
    the rank with the fewest tokens that still needs rows (LPT); or the next longest group of rows
    with one prompt, if its rank then computes less.

    Args:
        lengths_B: tokens of each row.
        prompts_B: int64 for each token with which it begins, and which a rank computes once for
            all rows that begin so. Empty: rows share nothing.

    Returns:
        A permutation. It puts the rows of rank r into slice r of ``dp_size`` equal slices of the
        batch. Each slice consists of ``num_minibatches`` equal mini-batches. In a mini-batch no
        rank computes more than the busiest one would in the given order.

    Raises:
        DispatchError: the rows do not divide evenly.
    """
    _require_even_shares(len(lengths_B), dp_size, num_minibatches)
    if dp_size == 1:
        return list(range(len(lengths_B)))
    costs = _Costs(lengths_B, prompts_B or [b""] * len(lengths_B))
    minibatch_size = len(lengths_B) // num_minibatches
    rows_of_rank: list[list[int]] = [[] for _ in range(dp_size)]
    for begin in range(0, len(lengths_B), max(minibatch_size, 1)):
        shares = costs.deal(range(begin, begin + minibatch_size), dp_size)
        for rank, share in enumerate(shares):
            rows_of_rank[rank].extend(share)
    return [row for rows in rows_of_rank for row in rows]


def _require_even_shares(num_rows: int, dp_size: int, num_minibatches: int) -> None:
    num_parts = dp_size * num_minibatches
    if num_rows % num_parts:
        below = num_rows // num_parts * num_parts
        raise DispatchError(
            f"cannot divide {num_rows} rows evenly over {dp_size} data-parallel ranks x "
            f"{num_minibatches} mini-batches; make trainer.num_prompts_per_step x "
            f"rollout.num_responses_per_prompt {below or num_parts} or {below + num_parts}"
        )


@dataclass(frozen=True, slots=True)
class _Costs:
    lengths_B: Sequence[int]
    prompts_B: Sequence[bytes]

    def of(self, rows: Sequence[int]) -> int:
        """Return the tokens that a rank computes for these rows."""
        saved = sum(self._prompt_tokens(row) for row in rows)
        first = {self.prompts_B[row]: self._prompt_tokens(row) for row in rows}
        return sum(self.lengths_B[row] for row in rows) - saved + sum(first.values())

    def deal(self, rows: range, dp_size: int) -> list[list[int]]:
        """Return the rows of each rank: dealt one by one, by prompt, or in the given order."""
        share_size = len(rows) // dp_size
        by_prompt: dict[bytes, list[int]] = {}
        for row in rows:
            by_prompt.setdefault(self.prompts_B[row], []).append(row)
        ways = [
            self._deal([[row] for row in rows], share_size, dp_size),
            self._deal(list(by_prompt.values()), share_size, dp_size),
            # With equal counts a greedy deal can be worse than the given order.
            [list(rows[rank * share_size : (rank + 1) * share_size]) for rank in range(dp_size)],
        ]
        return min(ways, key=lambda shares: max(map(self.of, shares)))

    def _deal(self, units: list[list[int]], share_size: int, dp_size: int) -> list[list[int]]:
        dealt: list[list[int]] = [[] for _ in range(dp_size)]
        poorest = [(0, rank) for rank in range(dp_size)]
        for unit in sorted(units, key=lambda unit: (-self.of(unit), unit[0])):
            untaken = unit
            while untaken:
                num_tokens, rank = heapq.heappop(poorest)
                room = share_size - len(dealt[rank])
                taken, untaken = untaken[:room], untaken[room:]
                dealt[rank].extend(taken)
                if len(dealt[rank]) < share_size:
                    heapq.heappush(poorest, (num_tokens + self.of(taken), rank))
        return dealt

    def _prompt_tokens(self, row: int) -> int:
        return len(self.prompts_B[row]) // torch.int64.itemsize
