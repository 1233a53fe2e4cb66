"""From rows to prompts: chat template, tokens, and the treatment of long prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.data.rows import Message, Row
from hybridrl.data.token_cache import Rendered, cache_file, read_rendered, write_rendered
from hybridrl.errors import DataError

log = logging.getLogger(__name__)

ROWS_TO_CACHE = 20_000
"""Rows of a set whose tokens are worth a file: half a second of work."""

_ROWS_PER_CALL = 1024
_ROWS_PER_NOTE = 128 * _ROWS_PER_CALL
_MAX_ROWS_SHOWN = 5
_MAX_CHARS_SHOWN = 80


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row with its prompt's tokens."""

    row: Row

    prompt_text: str
    """The full prompt after the chat template, even if its tokens were truncated."""

    token_ids: Tensor
    """int64 [L], L >= 1."""


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool,
    max_prompt_tokens: int,
    overlong: str,
    tools: Sequence[Mapping[str, Any]] = (),
    cache: Path | None = None,
) -> list[TokenizedRow]:
    """Tokenize every prompt now, so that a bad one ends the run before it began.

    Costs about 25 s per million short prompts.

    Args:
        rows: at least one.
        tokenizer: adds its own special tokens to a text prompt; with a chat template that does.
        use_chat_template: wrap prompts; a text becomes one user message.
        max_prompt_tokens: the longest prompt.
        overlong: treatment of a longer one: ``error``, ``drop``, or ``keep_end``, which keeps
            its last tokens.
        tools: schemas of tools, which the chat template shows the model.
        cache: folder in which the tokens of at least ``ROWS_TO_CACHE`` rows are kept; None keeps
            none.

    Returns:
        The rows in order; fewer if some were dropped.

    Raises:
        DataError: a chat prompt has no chat template; the template rejects a prompt or leaves it
            out; a prompt has no tokens. Or a prompt is overlong with ``overlong="error"``, or all
            prompts were dropped.
    """
    rendered: list[Rendered] | None = None
    file = None
    if cache is not None and len(rows) >= ROWS_TO_CACHE:
        file = cache_file(cache, rows, tokenizer, use_chat_template=use_chat_template, tools=tools)
        rendered = None if file is None else read_rendered(file, num_rows=len(rows))
    if rendered is None:
        rendered = _render(rows, tokenizer, use_chat_template=use_chat_template, tools=tools)
        if file is not None:
            write_rendered(file, rendered)
    tokenized = [
        TokenizedRow(row, *texts_and_tokens)
        for row, texts_and_tokens in zip(rows, rendered, strict=True)
    ]
    if use_chat_template:
        _require_different_texts(tokenized)
    return list(_limit_length(tokenized, max_prompt_tokens=max_prompt_tokens, overlong=overlong))


def _render(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool,
    tools: Sequence[Mapping[str, Any]],
) -> list[Rendered]:
    """Return text and tokens of each prompt; of many, the log says how far it is."""
    rendered: list[Rendered] = []
    for start in range(0, len(rows), _ROWS_PER_CALL):
        chunk = rows[start : start + _ROWS_PER_CALL]
        texts = [
            _to_text(row, tokenizer, use_chat_template=use_chat_template, tools=tools)
            for row in chunk
        ]
        # With a template the text already holds the special tokens.
        token_lists = tokenizer(
            texts, add_special_tokens=not use_chat_template, return_attention_mask=False
        )["input_ids"]
        for row, text, token_ids in zip(chunk, texts, token_lists, strict=True):
            if not token_ids:
                raise DataError(f"{row.origin}: the prompt {text!r} has no tokens; remove the row")
            if use_chat_template and not text.strip():
                raise DataError(
                    f"{row.origin}: the chat template renders the prompt as {text!r}, without a "
                    "word; correct the template, or set data.use_chat_template=false"
                )
            rendered.append((text, torch.tensor(token_ids)))
        if start and start % _ROWS_PER_NOTE == 0:
            log.info("tokenized prompts: count=%d of=%d", len(rendered), len(rows))
    return rendered


def _require_different_texts(rows: Sequence[TokenizedRow]) -> None:
    """Reject a template that leaves the prompt out: all prompts would be equal."""
    prompts = {row.row.prompt for row in rows}
    if len(prompts) > 1 and len({row.prompt_text for row in rows}) == 1:
        raise DataError(
            f"the chat template renders {len(prompts)} different prompts as the same text "
            f"{rows[0].prompt_text[:_MAX_CHARS_SHOWN]!r}: it leaves the prompt out; correct it, or "
            "set data.use_chat_template=false"
        )


def _to_text(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool,
    tools: Sequence[Mapping[str, Any]],
) -> str:
    if not use_chat_template:
        if isinstance(row.prompt, str):
            return row.prompt
        raise DataError(
            f"{row.origin}: the prompt is a list of chat messages and "
            "data.use_chat_template=false; set it to true, or write the prompt as text"
        )
    messages = (Message("user", row.prompt),) if isinstance(row.prompt, str) else row.prompt
    return render_chat(messages, tokenizer, origin=row.origin, tools=tools)


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    origin: str,
    is_complete: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Render messages with the tokenizer's chat template.

    Args:
        messages: of the chat so far.
        tokenizer: has a template.
        origin: of the row, for messages.
        is_complete: False adds the beginning of the assistant's next turn.
        tools: schemas of tools for the template to show.

    Raises:
        DataError: the template rejects them.
    """
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text: str = tokenizer.apply_chat_template(
            conversation,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=not is_complete,
        )
    except Exception as error:  # a template is a program, which may raise any error
        raise DataError(f"{origin}: the chat template rejects the prompt: {error}") from error
    return text


def _limit_length(
    rows: Sequence[TokenizedRow], *, max_prompt_tokens: int, overlong: str
) -> Iterator[TokenizedRow]:
    long = [row for row in rows if len(row.token_ids) > max_prompt_tokens]
    if long and overlong == "error":
        raise DataError(_describe_overlong(long, max_prompt_tokens=max_prompt_tokens))
    if long and overlong == "drop":
        log.warning("dropped overlong prompts: count=%d of=%d", len(long), len(rows))
        if len(long) == len(rows):
            shortest = min(len(row.token_ids) for row in long)
            raise DataError(
                f"all {len(rows)} prompts are longer than data.max_prompt_tokens="
                f"{max_prompt_tokens}; set it to {shortest} tokens or more"
            )
    for row in rows:
        if len(row.token_ids) <= max_prompt_tokens:
            yield row
        elif overlong == "keep_end":
            yield replace(row, token_ids=row.token_ids[-max_prompt_tokens:].clone())


def _describe_overlong(long: Sequence[TokenizedRow], *, max_prompt_tokens: int) -> str:
    shown = ", ".join(
        f"{row.row.origin} ({len(row.token_ids)} tokens)" for row in long[:_MAX_ROWS_SHOWN]
    )
    more = f" and {len(long) - _MAX_ROWS_SHOWN} more" if len(long) > _MAX_ROWS_SHOWN else ""
    longest = max(len(row.token_ids) for row in long)
    return (
        f"prompts longer than data.max_prompt_tokens={max_prompt_tokens}: {shown}{more}; set "
        f"data.max_prompt_tokens={longest}, or data.overlong_prompts=drop or keep_end"
    )
