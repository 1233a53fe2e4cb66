"""Special tokens in text that somebody else wrote: they become text.

A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands. So a result of a tool, or
the text of a data row, could end its own turn and begin one of another role.

The assistant's messages in a row keep theirs. A row has no other form for calls of tools, which
begin with a special token in some families (``<|python_tag|>``, ``[TOOL_CALLS]``); and supervised
fine-tuning learns such tokens there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from hybridrl.data.rows import Message

_ASSISTANT = "assistant"


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
            each if each.role == _ASSISTANT else Message(each.role, self.harmless(each.content))
            for each in messages
        ]


@lru_cache(maxsize=8)
def special_tokens_of(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """Return those of a tokenizer that gets no further ones."""
    return SpecialTokens(tokenizer)
