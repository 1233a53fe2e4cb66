"""Teachers score rows of the policy, each those of its own.

Legend: B rows, L tokens of a row, N tokens of all rows, J columns, K likeliest tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hybridrl.batch import (
    RolloutBatch,
    TrainBatch,
    jagged,
    jagged_from,
    row_lengths,
    row_offsets,
    without_rows,
)
from hybridrl.models.divergence import TeacherTokens
from hybridrl.workers.train.policy_engine import BaseModelReference, PolicyEngine

Teacher = PolicyEngine | BaseModelReference
_Rows = TypeVar("_Rows", RolloutBatch, TrainBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Teachers:
    """The models that the policy learns from; each row has one, by its number."""

    models: Sequence[Teacher]
    temperature: float
    vocab_size: int
    num_likeliest: int
    """K, tokens that the loss compares."""

    def logprobs(self, rows: RolloutBatch) -> Tensor:
        """Score the policy's own tokens: jagged float32 [B, L] nats."""

        def score(model: Teacher, taught: RolloutBatch) -> Tensor:
            scores = model.compute_logprobs(taught, temperature=self.temperature)
            return scores.logprobs_BL.values()[None]

        columns_1N = self._ask(rows, score)
        return jagged_from(columns_1N[0], row_lengths(rows.token_ids_BL))

    def teach(self, batch: TrainBatch) -> TrainBatch:
        """Return the rows with their teachers' likeliest tokens."""

        def score(model: Teacher, taught: TrainBatch) -> Tensor:
            return model.top_logprobs(
                taught,
                num_tokens=self.num_likeliest,
                vocab_size=self.vocab_size,
                temperature=self.temperature,
            )

        columns_JN, lengths_B = self._ask(batch, score), row_lengths(batch.token_ids_BL)
        tokens = TeacherTokens.of_columns(columns_JN, self.num_likeliest)
        batch = batch.clone(recurse=False)
        batch.teacher_top_logprobs_BLK = jagged_from(tokens.logprobs_SK, lengths_B)
        if tokens.ids_SK is not None:
            batch.teacher_top_ids_BLK = jagged_from(tokens.ids_SK, lengths_B)
        return batch

    def _ask(self, rows: _Rows, score: Callable[[Teacher, _Rows], Tensor]) -> Tensor:
        """Return the columns of each row by its own teacher, [J, N]; a collective call."""
        if rows.teacher_B is None and rows.teacher_prompt_BN is None:
            return score(self.models[0], rows)
        columns_JN = torch.zeros(0)
        for number, model in enumerate(self.models):
            taught = rows.clone(recurse=False)
            if rows.teacher_B is not None:
                others_B = rows.teacher_B != number
                taught.response_mask_BL = without_rows(rows.response_mask_BL, others_B)
            is_own_N = taught.response_mask_BL.values()
            if rows.teacher_prompt_BN is not None and rows.prompt_tokens_B is not None:
                taught = with_prompts(taught, rows.teacher_prompt_BN, rows.prompt_tokens_B)
            said = score(model, taught)
            if not number:
                columns_JN = said.new_zeros(len(said), len(is_own_N))
            columns_JN[:, is_own_N] = said[:, taught.response_mask_BL.values()]
        return columns_JN


def with_prompts(rows: _Rows, prompt_BN: Tensor, begin_B: Tensor) -> _Rows:
    """Return rows with other prompts, int64 jagged [B, N], of their first sequences.

    ``begin_B`` is where responses begin, int64: their first token may be out of the mask. A program
    may have begun further chats: a teacher reads these as they are.
    """
    prompts, begins = prompt_BN.unbind(), begin_B.tolist()

    def after(before: Sequence[Tensor], column_BL: Tensor) -> Tensor:
        columns = zip(before, column_BL.unbind(), begins, strict=True)
        return jagged([torch.cat([first, row_L[begin:]]) for first, row_L, begin in columns])

    rows = rows.clone(recurse=False)
    rows.token_ids_BL = after(prompts, rows.token_ids_BL)
    nothing = [torch.zeros_like(prompt_N, dtype=torch.bool) for prompt_N in prompts]
    rows.response_mask_BL = after(nothing, rows.response_mask_BL)
    if rows.mask_counts_BL is not None:
        rows.mask_counts_BL = after([each.int() for each in nothing], rows.mask_counts_BL)
    if rows.sequence_lengths_BQ is not None:
        lengths_BQ = rows.sequence_lengths_BQ
        lengths_Q = lengths_BQ.values().clone()
        lengths_Q[row_offsets(lengths_BQ)[:-1]] += row_lengths(prompt_BN) - begin_B
        rows.sequence_lengths_BQ = jagged_from(lengths_Q, row_lengths(lengths_BQ))
    return rows
