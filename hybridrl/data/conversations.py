"""Prompts and responses as a reward model reads them: its own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import PreferenceBatch, SupervisedBatch, jagged
from hybridrl.data.examples import PreferencePair
from hybridrl.data.prompts import TokenizedRow, render_chat, special_tokens_of
from hybridrl.data.rows import Message
from hybridrl.errors import DataError
from hybridrl.models.model_folder import read_settings


def render_conversation(
    row: TokenizedRow, response: str, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of a prompt and a response to it.

    With a chat template it is the complete chat, whose last turn is the response; special tokens in
    the response become text, so that it cannot end its turn. Without one the response follows the
    prompt's text. DataError if the template rejects the chat.
    """
    if not tokenizer.chat_template:
        return row.prompt_text + response
    prompt = row.row.prompt
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return render_chat(
        [*messages, Message("assistant", special_tokens_of(tokenizer).harmless(response))],
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
    for tokens in token_lists:
        if not has_template and tokens[-1:] != [end]:
            tokens.append(end)
        while len(tokens) > 1 and tokens[-1] == pad_token_id:
            tokens.pop()
    return token_lists


def lay_out_conversations(token_lists: Sequence[Sequence[int]]) -> SupervisedBatch:
    """Lay conversations out so that an engine computes the state after the last token of each."""
    token_ids_BL, mask_BL = _with_marked_ends(token_lists)
    return SupervisedBatch(
        token_ids_BL=token_ids_BL, response_mask_BL=mask_BL, batch_size=[len(token_lists)]
    )


@dataclass(frozen=True, slots=True)
class ConversationPair(PreferencePair):
    """A preference pair as a reward model reads it."""

    chosen: Sequence[int]  # tokens of the conversation with the chosen answer
    rejected: Sequence[int]


def tokenize_conversation_pairs(
    pairs: Sequence[PreferencePair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pad_token_id: int | None,
    max_tokens: int,
) -> list[ConversationPair]:
    """Tokenize both conversations of every pair now, so that a bad one ends the run early.

    Raises:
        DataError: the chat template rejects a row; or both conversations have the same tokens, or
            one has none, or more than ``max_tokens``, the model's context.
    """
    texts = [
        render_conversation(pair, answer, tokenizer)
        for pair in pairs
        for answer in (pair.row.answer, str(pair.row.rejected))
    ]
    tokens = tokenize_conversations(texts, tokenizer, pad_token_id=pad_token_id)
    tokenized = [
        ConversationPair(
            *(pair.row, pair.prompt_text, pair.token_ids, pair.chosen_ids, pair.rejected_ids),
            *tokens[2 * number : 2 * number + 2],
        )
        for number, pair in enumerate(pairs)
    ]
    for pair in tokenized:
        if flaw := _flaw_of(pair, max_tokens=max_tokens):
            raise DataError(f"{pair.row.origin}: {flaw}; remove the row")
    return tokenized


def build_conversation_batch(pairs: Sequence[ConversationPair]) -> PreferenceBatch:
    """Lay pairs out as ``lay_out_conversations`` does, else as ``build_preference_batch``."""
    token_ids_BL, mask_BL = _with_marked_ends(
        [tokens for pair in pairs for tokens in (pair.chosen, pair.rejected)]
    )
    margins_B = torch.tensor([pair.row.margin for pair in pairs for _ in range(2)])
    return PreferenceBatch(
        token_ids_BL=token_ids_BL,
        response_mask_BL=mask_BL,
        margins_B=margins_B if margins_B.any() else None,
        batch_size=[2 * len(pairs)],
    )


def pad_token_of(folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> int | None:
    """Return the padding that ``config.json`` names, or else the tokenizer; None without one."""
    token = read_settings(folder).get("pad_token_id")
    if token is None and tokenizer is not None:
        token = tokenizer.pad_token_id
    return token if isinstance(token, int) and token >= 0 else None


def _with_marked_ends(token_lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    # Engines compute the state before a marked token: so one more, which nobody reads, is marked.
    rows = [torch.tensor([*tokens, tokens[-1]]) for tokens in token_lists]
    return jagged(rows), jagged([torch.arange(len(row)) == len(row) - 1 for row in rows])


def _flaw_of(pair: ConversationPair, *, max_tokens: int) -> str:
    longest = max(len(pair.chosen), len(pair.rejected))
    if not (pair.chosen and pair.rejected):
        return "the chat template renders a conversation as no tokens"
    if pair.chosen == pair.rejected:
        return "the conversations with the chosen and the rejected answer have the same tokens"
    if longest > max_tokens:
        return f"a conversation has {longest} tokens, and the model's context is {max_tokens}"
    return ""
