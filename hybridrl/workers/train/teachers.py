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
        if len(self.models) == 1 and rows.teacher_prompt_BN is None:
            return score(self.models[0], rows)
        columns_JN = torch.zeros(0)
        for number, model in enumerate(self.models):
            taught = rows.clone(recurse=False)
            if rows.teacher_B is not None:
                others_B = rows.teacher_B != number
                taught.response_mask_BL = without_rows(rows.response_mask_BL, others_B)
            is_own_N = taught.response_mask_BL.values()
            if rows.teacher_prompt_BN is not None:
                taught = with_prompts(taught, rows.teacher_prompt_BN)
            said = score(model, taught)
            if not number:
                columns_JN = said.new_zeros(len(said), len(is_own_N))
            columns_JN[:, is_own_N] = said[:, taught.response_mask_BL.values()]
        return columns_JN


def with_prompts(rows: _Rows, prompt_BN: Tensor) -> _Rows:
    """Return rows whose tokens before the first response token are others, int64 jagged [B, N].

    Rows without a response token, which nobody reads, keep theirs.
    """
    token_ids, masks = [], []
    columns = (rows.token_ids_BL, rows.response_mask_BL, prompt_BN)
    for tokens_L, mask_L, prompt_N in zip(*(column.unbind() for column in columns), strict=True):
        begin = int(mask_L.int().argmax())
        token_ids.append(torch.cat([prompt_N, tokens_L[begin:]]))
        masks.append(torch.cat([mask_L.new_zeros(len(prompt_N)), mask_L[begin:]]))
    rows = rows.clone(recurse=False)
    rows.token_ids_BL, rows.response_mask_BL = jagged(token_ids), jagged(masks)
    return rows
