"""Prompts and responses as a reward model reads them: its own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import SupervisedBatch, jagged
from hybridrl.config.model_folder import read_settings
from hybridrl.data.prompts import TokenizedRow, render_chat
from hybridrl.data.rows import Message


def render_conversation(
    row: TokenizedRow, response: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of a prompt and a response to it.

    With a chat template it is the complete chat, whose last turn is the response. Without one the
    response follows the prompt's text.

    Raises:
        DataError: the template rejects the chat.
    """
    if not tokenizer.chat_template:
        return row.prompt_text + response
    prompt = row.row.prompt
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return render_chat(
        [*messages, Message("assistant", response)],
        tokenizer,
        origin=row.row.origin,
        is_complete=True,
    )


def tokenize_conversations(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, pad_token_id: int | None
) -> list[list[int]]:
    """Return the tokens of each conversation; the score is that of the last one.

    Without a chat template, which ends a turn itself, the end-of-sequence token is added. Tokens at
    the end that are the model's padding do not count, as in transformers.
    """
    has_template = bool(tokenizer.chat_template)
    token_lists: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=not has_template, return_attention_mask=False
    )["input_ids"]
    end = tokenizer.eos_token_id
    return [
        _without_padding(
            tokens if has_template or tokens[-1:] == [end] else [*tokens, end], pad_token_id
        )
        for tokens in token_lists
    ]


def lay_out_conversations(token_lists: Sequence[Sequence[int]]) -> SupervisedBatch:
    """Lay conversations out so that an engine computes the state after the last token of each.

    Engines compute the state before a marked token. So one more token, which nobody reads, is
    marked behind each conversation.

    Args:
        token_lists: B >= 1 conversations of at least one token.
    """
    lengths = [len(tokens) for tokens in token_lists]
    return SupervisedBatch(
        token_ids_BL=jagged([torch.tensor([*tokens, tokens[-1]]) for tokens in token_lists]),
        response_mask_BL=jagged([torch.arange(length + 1) == length for length in lengths]),
        batch_size=[len(token_lists)],
    )


def pad_token_of(folder: Path) -> int | None:
    """Return the padding that ``config.json`` names; None if it names none."""
    token = read_settings(folder).get("pad_token_id")
    return token if isinstance(token, int) and token >= 0 else None


def _without_padding(tokens: list[int], pad_token_id: int | None) -> list[int]:
    length = len(tokens)
    while length > 1 and tokens[length - 1] == pad_token_id:
        length -= 1
    return tokens[:length]
