"""Preference pairs: a prompt with a chosen and a rejected answer, as tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import PreferenceBatch, jagged
from hybridrl.data.prompts import Overlong, TokenizedRow, tokenize_answers
from hybridrl.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreferencePair(TokenizedRow):
    """A row with the tokens of its prompt and of both answers."""

    chosen_ids: Tensor
    """int64 [L], the answer and the end-of-sequence token."""

    rejected_ids: Tensor
    """int64 [L], likewise."""


def tokenize_pairs(
    rows: Sequence[TokenizedRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_answer_tokens: int,
    drops_overlong: bool,
) -> list[PreferencePair]:
    """Tokenize both answers of every pair now, so that a bad one ends the run before it began.

    Args:
        rows: with a rejected answer, their prompts tokenized.
        tokenizer: the one that tokenized the prompts.
        max_answer_tokens: the longest answer, with its end-of-sequence token.
        drops_overlong: leave pairs with a longer answer out, instead of raising.

    Returns:
        The pairs in order; fewer if some were dropped.

    Raises:
        DataError: the answers of a pair have the same tokens; one is overlong and not dropped, or
            all pairs were dropped; a row has no rejected answer.
    """
    if missing := [row.row.origin for row in rows if row.row.rejected is None]:
        raise DataError(f"{missing[0]} has no rejected answer; set data.rejected_key=COLUMN")
    chosen = tokenize_answers([row.row.answer for row in rows], tokenizer)
    rejected = tokenize_answers([str(row.row.rejected) for row in rows], tokenizer)
    pairs = [
        PreferencePair(row.row, row.prompt_text, row.token_ids, *map(torch.tensor, answers))
        for row, *answers in zip(rows, chosen, rejected, strict=True)
    ]
    for pair in pairs:
        if torch.equal(pair.chosen_ids, pair.rejected_ids):
            raise DataError(
                f"{pair.row.origin}: chosen and rejected answer have the same tokens; remove the "
                "row"
            )
    kept, overlong = [], Overlong()
    for pair in pairs:
        longest = max(len(pair.chosen_ids), len(pair.rejected_ids))
        if longest > max_answer_tokens:
            overlong.add(pair.row.origin, longest)
        else:
            kept.append(pair)
    if overlong.count and not (drops_overlong and kept):
        text = overlong.name("answers", "rollout.max_response_tokens", max_answer_tokens)
        raise DataError(f"{text} to leave such pairs out")
    if overlong.count:
        log.warning(
            "dropped pairs with overlong answers: count=%d of=%d", overlong.count, len(pairs)
        )
    return kept


def build_preference_batch(pairs: Sequence[PreferencePair]) -> PreferenceBatch:
    """Lay prompt and answer of each row end to end, with the chosen before the rejected answer.

    Returns:
        2 P rows; the mask is on the answer and on the end-of-sequence token.
    """
    rows = [
        (pair.token_ids, answer)
        for pair in pairs
        for answer in (pair.chosen_ids, pair.rejected_ids)
    ]
    return PreferenceBatch(
        token_ids_BL=jagged([torch.cat(row) for row in rows]),
        response_mask_BL=jagged([torch.arange(len(p) + len(a)) >= len(p) for p, a in rows]),
        batch_size=[len(rows)],
    )
