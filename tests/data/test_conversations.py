"""Conversations of a reward model that is trained: tokens of pairs, their margins, bad rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.data.conversations import (
    build_conversation_batch,
    pad_token_of,
    tokenize_conversation_pairs,
)
from hybridrl.data.examples import PreferencePair
from hybridrl.data.parsing import Columns, columns_of
from hybridrl.data.rows import Row, fingerprint
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import DataError
from tests.config.values import config_of
from tests.data.tokenized import read_rows

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NOTHING = torch.zeros(0, dtype=torch.int64)


def tokenizer_with(chat_template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def pair_of(chosen: str, rejected: str, *, margin: float = 0.0) -> PreferencePair:
    row = Row("p=", chosen, source="s", origin="file:7", rejected=rejected, margin=margin)
    return PreferencePair(row, "p=", NOTHING, NOTHING, NOTHING)


def test_the_last_token_of_both_conversations_is_scored() -> None:
    tokenizer = tokenizer_with(CHAT)
    pairs = tokenize_conversation_pairs(
        [pair_of("good", "bad"), pair_of("a", "b", margin=1.5)],
        tokenizer,
        pad_token_id=None,
        max_tokens=100,
    )
    batch = build_conversation_batch(pairs)
    texts = [tokenizer.decode(row[:-1]) for row in batch.token_ids_BL.unbind()]
    assert texts == [f"<user>p=<assistant>{answer}" for answer in ("good", "bad", "a", "b")]
    masks = [mask.nonzero().view(-1).tolist() for mask in batch.response_mask_BL.unbind()]
    assert masks == [[len(text)] for text in texts]
    assert batch.margins_B is not None
    assert batch.margins_B.tolist() == [0.0, 0.0, 1.5, 1.5]
    assert build_conversation_batch(pairs[:1]).margins_B is None


BAD = [
    (CHAT, ("good", "x" * 60), 40, r"file:7: a conversation has 79 tokens.* context is 40"),
    (CHAT.replace("m.content", "m.content[:2]"), ("abc", "abe"), 40, "the same tokens"),
    ("{{ raise_exception('never') }}", ("a", "b"), 40, "file:7: .*rejects the prompt: never"),
]


@pytest.mark.parametrize(("template", "answers", "max_tokens", "words"), BAD)
def test_a_pair_that_cannot_be_learned_is_named(
    template: str, answers: tuple[str, str], max_tokens: int, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        tokenize_conversation_pairs(
            [pair_of(*answers)], tokenizer_with(template), pad_token_id=None, max_tokens=max_tokens
        )


def test_margins_are_a_column_of_numbers(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    line = '{"prompt": "p", "chosen": "a", "rejected": "b", "better_by": %s}\n'
    config = config_of("mode=reward_model", "reward_model.margin_key=better_by")
    assert columns_of(config, "data").margin == "better_by"
    assert columns_of(replace(config, mode="dpo"), "data").margin is None
    columns = Columns(answer="chosen", rejected="rejected", margin="better_by")
    file.write_text(line % 0.5 + line % "0")
    rows = read_rows(file, columns=columns)
    assert [row.margin for row in rows] == [0.5, 0.0]
    assert fingerprint(rows[:1]) != fingerprint([replace(rows[0], margin=0.0)])
    file.write_text(line % '"much"')
    with pytest.raises(DataError, match=r"'better_by' is 'much'.* must be a finite number"):
        read_rows(file, columns=columns)
    file.write_text(line.replace("better_by", "by") % 1)
    with pytest.raises(DataError, match=r"has no 'better_by'; set reward_model\.margin_key"):
        read_rows(file, columns=columns)


@pytest.mark.parametrize(
    ("settings", "expected"), [({"pad_token_id": 5}, 5), ({"pad_token_id": -1}, None), ({}, 257)]
)
def test_padding_is_that_of_the_model_or_else_of_its_tokenizer(
    tmp_path: Path, settings: Mapping[str, int], expected: int | None
) -> None:
    fields = {"model_type": "qwen3", "vocab_size": 300, **settings}
    (tmp_path / "config.json").write_text(str(fields).replace("'", '"'))
    tokenizer = build_starter_tokenizer()
    assert pad_token_of(tmp_path, tokenizer) == expected
    assert pad_token_of(tmp_path) == (None if not settings else expected)
