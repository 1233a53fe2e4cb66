from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message, Row
from hybridrl.errors import DataError
from tests.data.tokenized import tokenize_rows


def rows(*prompts: str | tuple[Message, ...]) -> list[Row]:
    return [Row(prompt, "x", "s", f"file:{n}") for n, prompt in enumerate(prompts, 1)]


def tokenize(
    data: list[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool = False,
    overlong: str = "error",
) -> Sequence[TokenizedRow]:
    return tokenize_rows(
        data, tokenizer, use_chat_template=chat, max_prompt_tokens=20, overlong=overlong
    )


def test_template_takes_chats_and_plain_texts(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    chat = (Message("system", "s"), Message("user", "u"))
    tokenized = tokenize_rows(rows(chat, "u"), chat_tokenizer, use_chat_template=True)
    texts = ["<system>s<user>u<assistant>", "<user>u<assistant>"]
    assert [row.prompt_text for row in tokenized] == texts
    assert [chat_tokenizer.decode(row.token_ids) for row in tokenized] == texts


def test_a_template_writes_all_special_tokens_itself(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 256)]
    )
    (plain,) = tokenize(rows("u"), chat_tokenizer)
    assert chat_tokenizer.decode(plain.token_ids) == "<|end|>u"
    (chat,) = tokenize(rows("u"), chat_tokenizer, chat=True)
    assert chat_tokenizer.decode(chat.token_ids) == "<user>u<assistant>"


def test_order_is_kept_over_many_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenized = tokenize(rows(*(f"{n}=" for n in range(2500))), tokenizer)
    assert [tokenizer.decode(row.token_ids) for row in tokenized] == [f"{n}=" for n in range(2500)]


def test_overlong_prompts_are_named_with_their_lengths(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError) as raised:
        tokenize(rows("a" * 20, "b" * 21, "c" * 35), tokenizer)
    assert "file:2 (21 tokens), file:3 (35 tokens); set data.max_prompt_tokens=35" in str(
        raised.value
    )
    assert "file:1" not in str(raised.value)


def test_overlong_prompts_are_dropped_and_counted(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kept = tokenize(rows("a", "b" * 21, "c"), tokenizer, overlong="drop")
    assert [row.prompt_text for row in kept] == ["a", "c"]
    assert "count=1 of=3" in caplog.text


def test_dropping_all_prompts_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match=r"all 2 prompts are longer .* set it to 21 tokens"):
        tokenize(rows("a" * 30, "b" * 21), tokenizer, overlong="drop")


def test_keep_end_keeps_the_last_tokens_and_owns_them(tokenizer: PreTrainedTokenizerBase) -> None:
    (row,) = tokenize(rows("a" * 10 + "b" * 19), tokenizer, overlong="keep_end")
    assert tokenizer.decode(row.token_ids) == "a" + "b" * 19
    assert row.prompt_text == "a" * 10 + "b" * 19
    assert row.token_ids.untyped_storage().nbytes() == 20 * 8


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('must alternate') }}", "the chat template rejects .* must alternate"),
        ("{{ '' }}", "the prompt '' has no tokens"),
        ("{{ ' ' }}", "the chat template renders .* without a word"),
        ("{{ '\\n\\n' }}", "the chat template renders .* without a word"),
    ],
)
def test_a_row_that_the_template_cannot_render_is_named(
    tokenizer: PreTrainedTokenizerBase, template: str, problem: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"file:1: {problem}"):
        tokenize(rows("31="), tokenizer, chat=True)


def test_a_chat_without_template_names_the_row_and_the_key(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with pytest.raises(DataError, match=r"file:2: .*data\.use_chat_template=false; set it to true"):
        tokenize(rows("a", (Message("user", "u"),)), tokenizer)


def test_a_template_that_leaves_the_prompt_out_is_named(
    chat_tokenizer: PreTrainedTokenizerBase,
) -> None:
    chat_tokenizer.chat_template = "<assistant>"
    assert len(tokenize(rows("31=", "31="), chat_tokenizer, chat=True)) == 2
    with pytest.raises(DataError, match=r"2 different prompts as the same text '<assistant>'"):
        tokenize(rows("31=", "41="), chat_tokenizer, chat=True)
