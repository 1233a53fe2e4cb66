"""Special tokens in text that somebody else wrote: they become text.

A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands. So a result of a tool, or
the text of a data row, could end its own turn and begin one of another role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


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
