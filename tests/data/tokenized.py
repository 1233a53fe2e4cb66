"""Rows of a test as prompts, without files."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from hybridrl.data.encoding import RowEncoder
from hybridrl.data.row_table import RowTable
from hybridrl.data.rows import Row
from hybridrl.data.tokenizing import encode_rows


def tokenize_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    use_chat_template: bool,
    max_prompt_tokens: int,
    overlong: str,
) -> RowTable:
    """Tokenize rows that are in memory; see `RowEncoder` and `encode_rows`."""
    encoder = RowEncoder(
        tokenizer=tokenizer,
        use_chat_template=use_chat_template,
        max_prompt_tokens=max_prompt_tokens,
        overlong=overlong,
    )
    return encode_rows(rows, encoder)
