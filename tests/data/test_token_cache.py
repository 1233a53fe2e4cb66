"""Tokens of large sets that are kept on disk, under a name that says what they depend on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.data import prompts
from hybridrl.data.prompts import TokenizedRow, tokenize_rows
from hybridrl.data.rows import Row
from hybridrl.data.starter_tokenizer import build_starter_tokenizer

ROWS = [Row(f"é{n}" * (n + 1), str(n), "s", f"f:{n}") for n in range(6)]
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


@pytest.fixture(autouse=True)
def few_rows_are_many(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prompts, "ROWS_TO_CACHE", 6)
    caplog.set_level(logging.INFO)


def tokenize(
    folder: Path | None,
    rows: list[Row] = ROWS,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    use_chat_template: bool = False,
    max_prompt_tokens: int = 100,
) -> list[TokenizedRow]:
    return tokenize_rows(
        rows,
        tokenizer or build_starter_tokenizer(),
        use_chat_template=use_chat_template,
        max_prompt_tokens=max_prompt_tokens,
        overlong="drop",
        cache=folder,
    )


def assert_same(left: list[TokenizedRow], right: list[TokenizedRow]) -> None:
    assert [(row.row, row.prompt_text) for row in left] == [(r.row, r.prompt_text) for r in right]
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert one.token_ids.dtype == torch.int64


def test_kept_tokens_are_those_that_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokenize(None)
    assert_same(tokenize(tmp_path), expected)
    assert "come from" not in caplog.text
    assert_same(tokenize(tmp_path), expected)
    assert "tokens of 6 prompts come from" in caplog.text
    assert len(tokenize(tmp_path, max_prompt_tokens=10)) < 6  # the limit is applied afterwards
    assert len(list(tmp_path.iterdir())) == 1


def _with_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE


def _with_token(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["é1"])


@pytest.mark.parametrize("change", [_with_template, _with_token])
def test_another_tokenizer_has_another_file(
    tmp_path: Path, change: Callable[[PreTrainedTokenizerBase], None]
) -> None:
    tokenize(tmp_path)
    changed = build_starter_tokenizer()
    change(changed)
    assert_same(tokenize(tmp_path, tokenizer=changed), tokenize(None, tokenizer=changed))
    assert len(list(tmp_path.iterdir())) == 2


def test_other_rows_or_a_template_have_another_file(tmp_path: Path) -> None:
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenize(tmp_path, tokenizer=tokenizer)
    tokenize(tmp_path, ROWS[::-1], tokenizer)
    wrapped = tokenize(tmp_path, tokenizer=tokenizer, use_chat_template=True)
    assert wrapped[0].prompt_text == "<é0>"
    assert len(list(tmp_path.iterdir())) == 3
    assert_same(tokenize(tmp_path, tokenizer=tokenizer, use_chat_template=True), wrapped)


@pytest.mark.parametrize("num_bytes", [0, 100, 700])
def test_a_broken_file_is_made_again(
    tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokenize(tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert_same(tokenize(tmp_path), expected)
    assert "tokens are made again" in caplog.text
    caplog.clear()
    assert_same(tokenize(tmp_path), expected)
    assert "come from" in caplog.text


def test_small_sets_and_full_disks_keep_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenize(tmp_path, ROWS[:5])
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    assert len(tokenize(tmp_path / "file")) == 6
    assert "tokens are not kept" in caplog.text
