"""From rows as they were read to blocks of bytes: parsed, tokenized, long prompts treated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridrl.data.columns import Columns
from hybridrl.data.parsing import RawRow, parse
from hybridrl.data.prompts import Rendered, render
from hybridrl.data.records import Malformed
from hybridrl.data.row_table import encode_block
from hybridrl.data.rows import Row


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """A block of rows, and the faults of those that are not in it."""

    block: bytes
    """Of the rows that are left; empty if none is. See ``data/row_table.py``."""

    num_rows: int
    """Rows that were well formed, with those that were left out."""

    malformed: Sequence[str]
    """Origin and reason."""

    overlong: Sequence[tuple[str, int]]
    """Origin and tokens of each longer prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowEncoder:
    """Encodes rows; the result depends on nothing else, so any process may do it."""

    tokenizer: PreTrainedTokenizerBase
    """See ``data/prompts.py``."""

    use_chat_template: bool
    max_prompt_tokens: int

    overlong: str
    """Treatment of a longer prompt: ``error``, ``drop``, or ``keep_end``: its last tokens."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas that the chat template shows the model."""

    columns: Columns | None = None
    """Of rows that were read; None if all rows are parsed."""

    def __call__(self, raws: Sequence[RawRow | Row]) -> EncodedRows:
        """Encode some rows.

        Raises:
            DataError: a prompt cannot be rendered or tokenized.
        """
        rows, malformed = [], []
        for raw in raws:
            try:
                rows.append(raw if isinstance(raw, Row) else parse(raw, self.columns or Columns()))
            except Malformed as problem:
                malformed.append(f"{raw.origin}: {problem}")
        if not rows:
            return EncodedRows(b"", 0, malformed, [])
        rendered = render(
            rows, self.tokenizer, use_chat_template=self.use_chat_template, tools=self.tools
        )
        kept: list[tuple[Row, Rendered]] = []
        overlong = []
        for row, (text, token_ids) in zip(rows, rendered, strict=True):
            if len(token_ids) > self.max_prompt_tokens:
                overlong.append((row.origin, len(token_ids)))
                if self.overlong == "keep_end":
                    kept.append((row, (text, token_ids[-self.max_prompt_tokens :])))
            else:
                kept.append((row, (text, token_ids)))
        return EncodedRows(encode_block(kept) if kept else b"", len(rows), malformed, overlong)
