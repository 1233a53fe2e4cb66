"""Prompts with their answers as tokens, for supervised fine-tuning; turns in prompts, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import SupervisedBatch, jagged
from hybridrl.data.prompts import TokenizedRow, render_chat, tokenize_answers
from hybridrl.errors import DataError


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
        learns_all_turns: also of the assistant's turns in the prompts; see `assistant_mask`.

    Returns:
        B rows; the loss is taken on the answer and on the end-of-sequence token.

    Raises:
        DataError: the turns of a prompt are not known.
    """
    answers = tokenize_answers([row.row.answer for row in rows], tokenizer)
    tokens, masks = [], []
    for row, answer in zip(rows, answers, strict=True):
        target = torch.tensor(answer)
        tokens.append(torch.cat([row.token_ids, target]))
        in_prompt = torch.zeros(len(row.token_ids), dtype=torch.bool)
        if learns_all_turns:
            in_prompt = assistant_mask(row, tokenizer)
        masks.append(torch.cat([in_prompt, torch.ones(len(target), dtype=torch.bool)]))
    return SupervisedBatch(
        token_ids_BL=jagged(tokens), response_mask_BL=jagged(masks), batch_size=[len(rows)]
    )


_ASSISTANT = "assistant"


def assistant_mask(row: TokenizedRow, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Mark the tokens that the assistant wrote, with the end-of-sequence token of each turn.

    A turn is the text that the chat template adds for its message, up to that token. The tokens are
    those of the full prompt: nothing is tokenized apart.

    Args:
        row: tokenized with the chat template; its prompt may have lost its first tokens.
        tokenizer: the one that tokenized it.

    Returns:
        bool [L]; all False for a prompt that is text.

    Raises:
        DataError: the template renders an earlier turn differently once others follow, as some do
            that remove thoughts; or the tokenizer does not say where its tokens are in the text.
    """
    spans = list(_turn_spans(row, tokenizer))
    if not spans:
        return torch.zeros(len(row.token_ids), dtype=torch.bool)
    if not tokenizer.is_fast:
        raise DataError(
            f"{row.row.origin}: this tokenizer does not say where its tokens are in the text; put "
            "tokenizer.json into the model folder, or set sft.turns=last"
        )
    encoded = tokenizer(row.prompt_text, add_special_tokens=False, return_offsets_mapping=True)
    is_learned = [
        any(begin <= first < last <= end for begin, end in spans)
        for first, last in encoded["offset_mapping"]
    ]
    return torch.tensor(is_learned[len(is_learned) - len(row.token_ids) :])


def _turn_spans(row: TokenizedRow, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each turn in the text of the prompt."""
    messages = () if isinstance(row.row.prompt, str) else row.row.prompt
    for index, message in enumerate(messages):
        if message.role != _ASSISTANT:
            continue
        before = render_chat(messages[:index], tokenizer, origin=row.row.origin)
        turn = messages[: index + 1]
        after = render_chat(turn, tokenizer, origin=row.row.origin, is_complete=True)
        if not (after.startswith(before) and row.prompt_text.startswith(after)):
            raise DataError(
                f"{row.row.origin}: the chat template renders message {index + 1} of the prompt "
                "differently once others follow, so its tokens cannot be learned there; set "
                "sft.turns=last, or correct the template"
            )
        end = after.rfind(tokenizer.eos_token, len(before))
        yield len(before), len(after) if end < 0 else end + len(tokenizer.eos_token)
