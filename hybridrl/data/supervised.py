"""Prompts with their answers, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import SupervisedBatch, jagged
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.turns import assistant_mask


def build_supervised_batch(
    rows: Sequence[TokenizedRow],
    tokenizer: PreTrainedTokenizerBase,
    *,
    learns_all_turns: bool = False,
) -> SupervisedBatch:
    """Lay prompt, answer and end-of-sequence token of each row end to end.

    Args:
        rows: B >= 1 rows.
        tokenizer: the one that tokenized the prompts; it adds no special token to an answer.
        learns_all_turns: also of the assistant's turns in the prompts; see ``data/turns.py``.

    Returns:
        B rows; the loss is taken on the answer and on the end-of-sequence token.

    Raises:
        DataError: the turns of a prompt are not known.
    """
    answers = tokenizer(
        [row.row.answer for row in rows], add_special_tokens=False, return_attention_mask=False
    )["input_ids"]
    tokens, masks = [], []
    for row, answer in zip(rows, answers, strict=True):
        target = torch.tensor([*answer, tokenizer.eos_token_id])
        tokens.append(torch.cat([row.token_ids, target]))
        in_prompt = torch.zeros(len(row.token_ids), dtype=torch.bool)
        if learns_all_turns:
            in_prompt = assistant_mask(row, tokenizer)
        masks.append(torch.cat([in_prompt, torch.ones(len(target), dtype=torch.bool)]))
    return SupervisedBatch(
        token_ids_BL=jagged(tokens), response_mask_BL=jagged(masks), batch_size=[len(rows)]
    )
