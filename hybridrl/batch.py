"""The batches between driver and workers: closed and typed.

Legend: P prompts, G responses per prompt, B = P * G rows, L = prompt + response tokens of a row,
J layers, K experts that a token goes through in each.
A field with suffix ``_BL`` or ``_BLJK`` is a jagged nested tensor: B rows of different length,
stored without padding in one flat ``values()`` tensor. All of one batch have the same row lengths.

A row is one response. A conversation whose history was rewritten is one row, too: its tokens are
several sequences laid end to end, ``sequence_lengths_BQ`` says how long each is, and models compute
each as if it were alone. All else reads rows and their response mask alone.

Batches that came through Ray are views of shared memory: read-only by contract, clone before
writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass
from torch import Tensor

import hybridrl.payload  # noqa: F401  # registers how tensors travel through Ray
from hybridrl.images import Images

MAX_PLAYERS = 128
"""Players of a conversation, at most: their numbers are int8."""


class PromptBatch(TensorClass):
    """P prompts, ready to be sampled from."""

    token_ids_PL: Tensor  # int64, jagged
    # int64, index in the run's prompt stream: no two prompts of a run share it
    prompt_index_P: Tensor
    seed_P: Tensor  # int64, response g to a prompt draws its random numbers from (seed, g) alone
    # uint8, jagged, the row as JSON (data/rows.py), with lengths of its own. None without an agent.
    row_PN: Tensor | None = None
    images_P: Any = None  # hybridrl.images.Images of each prompt. None: the model has no tower
    teacher_P: Tensor | None = None  # int64, see RolloutBatch
    teacher_prompt_PN: Tensor | None = None  # int64, jagged, see RolloutBatch


class RolloutBatch(TensorClass):
    """B responses; the G responses to a prompt are adjacent and in prompt order."""

    token_ids_BL: Tensor  # int64, jagged
    response_mask_BL: Tensor  # bool, jagged, the loss mask: True where the policy chose the token
    # float32 nats, jagged, by the rollout engine; 0 where the mask is False
    sampler_logprobs_BL: Tensor
    prompt_index_B: Tensor  # int64, same value for all responses to a prompt
    policy_version_B: Tensor  # int64, optimizer steps taken when its first token was sampled
    is_truncated_B: Tensor  # bool, True if the length limit and no stop token ended it
    # bool, True if a tool, environment or program broke: `turns_BN` ends with the reason. None
    # without an agent.
    is_failed_B: Tensor | None = None
    # int16, jagged, the experts of each token in the rollout engine; -1 for the last token.
    # None if the engine does not return them.
    routed_experts_BLJK: Tensor | None = None
    routed_experts_at_B: Any = None  # the same, left where it was sampled: see `leave_experts`
    images_B: Any = None  # of each row, as in PromptBatch
    # int64, jagged, tokens of each of a row's Q sequences. None: every row is one sequence.
    sequence_lengths_BQ: Tensor | None = None
    # uint8, jagged, the turns as JSON (agents/trajectory.py), with lengths of its own. None
    # without an agent. Nothing that learns reads it.
    turns_BN: Tensor | None = None
    # float32, jagged, rewards that an agent gave, 0 where the mask is False. None without an agent.
    agent_rewards_BL: Tensor | None = None
    # int8, jagged, number of the player that sampled each token, 0 where the mask is False. None
    # without an agent.
    players_BL: Tensor | None = None
    # int32, jagged, optimizer steps taken by the weights that sampled each token; -1 where the mask
    # is False. None if the run's settings let no token be older than ``policy_version_B``.
    weight_versions_BL: Tensor | None = None
    # int32, jagged, how many tokens top-k and top-p left for each sampled one; 0 where the mask is
    # False. None: all of the vocabulary, for all of its tokens.
    mask_counts_BL: Tensor | None = None
    # int32, jagged, with lengths of its own: those tokens, of each row one after another
    mask_ids_BM: Tensor | None = None
    teacher_B: Tensor | None = None  # int64, number of the row's teacher, or -1. None: there is one
    # int64, jagged, with lengths of its own: what the teacher reads before the response. None: the
    # same as the policy.
    teacher_prompt_BN: Tensor | None = None
    prompt_tokens_B: Tensor | None = None  # int64, those before the response, which it replaces
    # Of a served teacher, 0 in prompts; None: teachers are on ranks, or there are none.
    teacher_logprobs_BL: Tensor | None = None  # float32 nats, jagged
    teacher_top_logprobs_BLK: Tensor | None = None  # float32, jagged, see models/divergence.py
    teacher_top_ids_BLK: Tensor | None = None  # int32, jagged, of the same tokens


class ScoreBatch(TensorClass):
    """The scores of B rows by one model; both columns are 0 where the response mask is False."""

    logprobs_BL: Tensor  # float32 nats, jagged
    entropy_BL: Tensor  # float32 nats, jagged, of the next-token distribution


class LogprobBatch(TensorClass):
    """Log-probs of the rollout's tokens before the update; None where not needed."""

    old_logprobs_BL: Tensor | None = None  # float32 nats, jagged, of the policy
    reference_logprobs_BL: Tensor | None = None  # float32 nats, jagged
    teacher_logprobs_BL: Tensor | None = None  # float32 nats, jagged
    squared_probs_BL: Tensor | None = None  # float32, jagged, sum of p^2 over the vocabulary


class TrainBatch(TensorClass):
    """B rows for the update in any order; responses to a prompt need not be adjacent."""

    token_ids_BL: Tensor  # int64, jagged
    response_mask_BL: Tensor  # bool, jagged
    advantages_BL: Tensor  # float32, jagged, 0 where the mask is False
    sampler_logprobs_BL: Tensor  # float32 nats, jagged
    old_logprobs_BL: Tensor | None = None  # float32 nats, jagged; None: the detached current ones
    reference_logprobs_BL: Tensor | None = None  # float32 nats, jagged
    routed_experts_BLJK: Tensor | None = None  # int16, jagged, see RolloutBatch
    routed_experts_at_B: Any = None  # see RolloutBatch
    images_B: Any = None  # see RolloutBatch
    sequence_lengths_BQ: Tensor | None = None  # int64, jagged, see RolloutBatch
    sampler_weights_BL: Tensor | None = None  # float32, jagged, of a rollout correction
    teacher_B: Tensor | None = None  # int64, see RolloutBatch
    teacher_prompt_BN: Tensor | None = None  # int64, jagged, see RolloutBatch
    prompt_tokens_B: Tensor | None = None  # int64, see RolloutBatch
    teacher_top_logprobs_BLK: Tensor | None = None  # float32, jagged, see models/divergence.py
    teacher_top_ids_BLK: Tensor | None = None  # int32, jagged, of the same tokens
    group_tokens_B: Tensor | None = None  # int64, response tokens of the row's group
    group_rows_B: Tensor | None = None  # int64, rows of the group that have response tokens
    weight_versions_BL: Tensor | None = None  # int32, jagged, see RolloutBatch
    mask_counts_BL: Tensor | None = None  # int32, jagged, see RolloutBatch
    mask_ids_BM: Tensor | None = None  # int32, jagged, see RolloutBatch


class ValueBatch(TensorClass):
    """The critic's values of B rollouts before the update."""

    values_BL: Tensor  # float32 reward units, jagged, of the state before each token; 0 unmasked


class CriticBatch(TensorClass):
    """B rows for the critic's update; row order is free."""

    token_ids_BL: Tensor  # int64, jagged
    response_mask_BL: Tensor  # bool, jagged
    old_values_BL: Tensor  # float32 reward units, jagged, before the step's first update
    returns_BL: Tensor  # float32 reward units, jagged, targets of the values
    sequence_lengths_BQ: Tensor | None = None  # int64, jagged, see RolloutBatch


class RewardBatch(TensorClass):
    """The scores of B conversations by one reward model."""

    rewards_B: Tensor  # float32


class SupervisedBatch(TensorClass):
    """B prompt-and-answer rows for supervised fine-tuning."""

    token_ids_BL: Tensor  # int64, jagged
    response_mask_BL: Tensor  # bool, jagged, True where the loss is taken
    images_B: Any = None  # see RolloutBatch


class PreferenceBatch(TensorClass):
    """B rows of B / 2 pairs: row 2i has the chosen answer, row 2i + 1 the rejected one."""

    token_ids_BL: Tensor  # int64, jagged
    response_mask_BL: Tensor  # bool, jagged, True on the answer and its end-of-sequence token
    images_B: Any = None  # see RolloutBatch
    reference_logprobs_B: Tensor | None = None  # float32 nats, sum over the answer
    margins_B: Tensor | None = None  # float32 score units, of each row's pair; None: 0


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """Lay B >= 1 rows [L_b] of one dtype and device end to end: jagged [B, L]."""
    lengths_B = torch.tensor([len(row) for row in rows])
    return jagged_from(torch.cat(list(rows)), lengths_B)


def jagged_from(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """View a flat tensor [T] as jagged [B, L] with the given row lengths, sum(lengths) == T."""
    offsets = torch.zeros(len(lengths_B) + 1, dtype=torch.int64, device=values_T.device)
    torch.cumsum(lengths_B, dim=0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values_T, offsets)


def row_offsets(values_BL: Tensor) -> Tensor:
    """Return where each row begins in ``values()``, and the end of the last: int64 [B + 1]."""
    offsets: Tensor = values_BL.offsets()  # type: ignore[attr-defined]  # of nested tensors alone
    return offsets


def row_lengths(values_BL: Tensor) -> Tensor:
    """Return the number of tokens of each row, int64 [B]."""
    return row_offsets(values_BL).diff()


def response_lengths(mask_BL: Tensor) -> Tensor:
    """Count the True entries of each row of a jagged bool [B, L], int64 [B]."""
    counts = torch.cumsum(mask_BL.values(), dim=0)
    counts = torch.cat([counts.new_zeros(1), counts])
    return counts[row_offsets(mask_BL)].diff()


def row_sums(values_BL: Tensor) -> Tensor:
    """Add the values of each row of a jagged float [B, L] on the host, [B]."""
    lengths_B = row_lengths(values_BL)
    return torch.segment_reduce(values_BL.values(), "sum", lengths=lengths_B)


def without_rows(response_mask_BL: Tensor, is_left_out_B: Tensor) -> Tensor:
    """Take all tokens of some rows out of the loss, as those of truncated responses.

    Their rewards still count in their group's baseline, as in TRL's mask_truncated_completions.
    """
    lengths_B = row_lengths(response_mask_BL)
    is_kept_T = np.repeat(np.logical_not(is_left_out_B.numpy()), lengths_B.numpy())
    is_kept_T &= response_mask_BL.values().numpy()
    return jagged_from(torch.from_numpy(is_kept_T), lengths_B)


def last_turns(mask_BL: Tensor) -> Tensor:
    """Keep the last run of True entries of each row of a jagged bool [B, L]. Of host columns."""
    mask_T, lengths_B = mask_BL.values().numpy(), row_lengths(mask_BL)
    index_T = np.arange(len(mask_T))
    last_false_T = np.maximum.accumulate(np.where(mask_T, -1, index_T))
    true_S, counts_B = np.flatnonzero(mask_T), response_lengths(mask_BL).numpy()
    begin_B = row_offsets(mask_BL)[:-1].numpy().copy()
    has_any_B = counts_B > 0
    last_true_B = true_S[counts_B.cumsum()[has_any_B] - 1]
    begin_B[has_any_B] = np.maximum(begin_B[has_any_B], last_false_T[last_true_B] + 1)
    is_last_T = mask_T & (index_T >= np.repeat(begin_B, lengths_B.numpy()))
    return jagged_from(torch.from_numpy(is_last_T), lengths_B)


def spread_over_tokens(values_B: Tensor, mask_BL: Tensor) -> Tensor:
    """Give each True token of row b the value ``values_B[b]``, others 0: jagged float32 [B, L].

    For columns on the host. By numpy, because torch gathers repeated values, and selects by a mask
    token by token: 0.5 instead of 4 ms for 2 M tokens.
    """
    lengths_B = row_lengths(mask_BL)
    values_T = np.repeat(values_B.detach().float().numpy(), lengths_B.numpy())
    np.copyto(values_T, 0.0, where=np.logical_not(mask_BL.values().numpy()))
    return jagged_from(torch.from_numpy(values_T), lengths_B)


def place_on_last_tokens(values_B: Tensor, mask_BL: Tensor) -> Tensor:
    """Give the last True token of row b the value ``values_B[b]``, others 0: float32 [B, L].

    The value of a row without a True token is lost.
    """
    lengths_B = response_lengths(mask_BL)
    true_T = mask_BL.values().nonzero()[:, 0]
    has_any_B = lengths_B > 0
    column_T = torch.zeros(mask_BL.values().shape)
    column_T[true_T[lengths_B.cumsum(0)[has_any_B] - 1]] = values_B.float()[has_any_B]
    return jagged_from(column_T, row_lengths(mask_BL))


def objects(values: Sequence[object]) -> NonTensorStack:
    """Return a column with one object a row."""
    return NonTensorStack(*(NonTensorData(value) for value in values))


def images_of(prompts: PromptBatch) -> list[Images]:
    """Return the images of each prompt; none of a model without a tower."""
    if prompts.images_P is None:
        return [()] * len(prompts)
    return list(prompts.images_P)


def leave_experts(rollouts: RolloutBatch) -> RolloutBatch:
    """Leave the experts of each row in Ray's memory on this machine; the batch gets references.

    So they never pass the driver: a row's have 40 times the bytes of its other columns. A rank
    that needs a row's takes them from the machine that sampled it (`routed_experts_of`).
    """
    if rollouts.routed_experts_BLJK is None:
        return rollouts
    rows = rollouts.routed_experts_BLJK.unbind()
    rollouts = rollouts.clone(recurse=False)
    rollouts.routed_experts_BLJK = None
    rollouts.routed_experts_at_B = objects([ray.put(row) for row in rows])
    return rollouts


def routed_experts_of(rows: RolloutBatch | TrainBatch) -> Tensor | None:
    """Return the experts of the rows' tokens, from where they were left; None without any."""
    if rows.routed_experts_at_B is None:
        return rows.routed_experts_BLJK
    return jagged(ray.get(list(rows.routed_experts_at_B)))
