"""From rows to prompts: chat template, special tokens, tokens.

A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands. So a result of a tool, or
the text of a data row, could end its own turn and begin one of another role: special tokens in text
that somebody else wrote become text.

The assistant's messages in a row keep theirs. A row has no other form for calls of tools, which
begin with a special token in some families (``<|python_tag|>``, ``[TOOL_CALLS]``); and supervised
fine-tuning learns such tokens there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.data.pixels import SizedImage
from hybridrl.data.rows import IMAGE_MARK, Message, Row, read_record, write_record
from hybridrl.errors import DataError

_ASSISTANT = "assistant"
_MAX_ROWS_SHOWN = 5

Rendered = tuple[str, Sequence[int]]
"""The text of a prompt, and its token ids."""


class SpecialTokens:
    """The texts that a tokenizer reads as special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, others: Iterable[str] = ()) -> None:
        """Collect them: those with a name, all that are marked as special, and ``others``.

        A token of one character is left out: it has no other form.
        """
        # Named ones alone are not enough: `<|start_header_id|>` of Llama 3 has no name.
        marked = (t.content for t in tokenizer.added_tokens_decoder.values() if t.special)
        texts = {*tokenizer.all_special_tokens, *marked, *others}
        longest_first = sorted((t for t in texts if len(t) > 1), key=lambda t: (-len(t), t))
        # Without any the expression matches nothing.
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def harmless(self, text: str) -> str:
        """Return the text with a space behind the first character of each special token."""
        while self._any.search(text):  # broken tokens may leave others, if they overlap
            text = self._any.sub(lambda each: f"{each[0][0]} {each[0][1:]}", text)
        return text

    def harmless_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of a row: those of the assistant as they are, the others harmless."""
        return [
            each if each.role == _ASSISTANT else replace(each, content=self.harmless(each.content))
            for each in messages
        ]


@lru_cache(maxsize=8)
def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return those of a tokenizer that gets no further ones."""
    return SpecialTokens(tokenizer)


@dataclass(frozen=True, slots=True)
class TokenizedRow:
    """A row with its prompt's tokens."""

    row: Row
    prompt_text: str  # the full prompt after the chat template, even if its tokens were truncated
    token_ids: Tensor  # int64 [L], L >= 1; of images repeated placeholders
    images: tuple[SizedImage, ...] | None = field(default=None, kw_only=True)
    """In the order of their placeholders; None: the model sees none."""


@dataclass(slots=True)
class Overlong:
    """Prompts or answers beyond their limit: the first ones, and statistics of all."""

    first: list[str] = field(default_factory=list)
    count: int = 0
    shortest: int = 0
    longest: int = 0

    def add(self, origin: str, num_tokens: int) -> None:
        """Note one."""
        if len(self.first) < _MAX_ROWS_SHOWN:
            self.first.append(f"{origin} ({num_tokens} tokens)")
        self.shortest = min(self.shortest, num_tokens) if self.count else num_tokens
        self.longest = max(self.longest, num_tokens)
        self.count += 1

    def name(self, kind: str, key: str, limit: int) -> str:
        """Say which, and the limit that holds all of them."""
        num_unnamed = self.count - len(self.first)
        more = f" and {num_unnamed} more" if num_unnamed else ""
        return (
            f"{kind} longer than {key}={limit}: {', '.join(self.first)}{more}; set "
            f"{key}={self.longest}, or data.overlong_prompts=drop"
        )


def render(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Rendered]:
    """Return text and tokens of each prompt.

    With ``use_chat_template`` a text becomes one user message, and the template adds special
    tokens; else the tokenizer does.

    Raises:
        DataError: a chat prompt has no chat template; the template rejects a prompt or leaves it
            out; a prompt has no tokens.
    """
    if not rows:
        return []
    texts = []
    for row in rows:
        prompt, origin = row.prompt, row.origin
        if use_chat_template:
            messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
            sees = bool(row.images)
            prompt = render_chat(messages, tokenizer, origin=origin, tools=tools, has_images=sees)
        elif not isinstance(prompt, str):
            raise DataError(
                f"{origin}: the prompt is a list of chat messages and "
                "data.use_chat_template=false; set it to true, or write the prompt as text"
            )
        texts.append(prompt)
    # With a template the text already holds the special tokens.
    token_lists = tokenizer(
        texts, add_special_tokens=not use_chat_template, return_attention_mask=False
    )["input_ids"]
    for row, text, token_ids in zip(rows, texts, token_lists, strict=True):
        if not token_ids:
            raise DataError(f"{row.origin}: the prompt {text!r} has no tokens; remove the row")
        if use_chat_template and not text.strip():
            raise DataError(
                f"{row.origin}: the chat template renders the prompt as {text!r}, without a "
                "word; correct the template, or set data.use_chat_template=false"
            )
    return list(zip(texts, token_lists, strict=True))


def tokenize_answers(answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each answer, with the end-of-sequence token."""
    encoded = tokenizer(list(answers), add_special_tokens=False, return_attention_mask=False)
    return [[*tokens, tokenizer.eos_token_id] for tokens in encoded["input_ids"]]


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    origin: str,
    is_complete: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    has_images: bool = False,
) -> str:
    """Render messages with the tokenizer's chat template.

    Special tokens in their contents become text, but for the assistant's. Unless ``is_complete``,
    the beginning of the assistant's next turn is added. With images the template gets parts of
    text, and of type ``image`` for each mark. DataError if the template rejects them.
    """
    harmless = special_tokens_of(tokenizer).harmless_messages(messages)
    conversation = [
        {"role": each.role, "content": message_parts(each.content) if has_images else each.content}
        for each in harmless
    ]
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


def message_parts(content: str) -> list[dict[str, str]]:
    """Return text and images in turns, as templates of models that see take them."""
    first, *others = content.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}] if first else []
    for text in others:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def encode_row(row: Row) -> Tensor:
    """Write a row as a tensor: uint8 [n]."""
    data = row.origin.encode() + b"\0" + write_record(row)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_row(data: Tensor) -> Row:
    """Read a row from ``encode_row``."""
    origin, _, record = data.numpy().tobytes().partition(b"\0")
    return read_record(record, origin=origin.decode())
