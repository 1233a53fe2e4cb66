"""Prompts with their answers as tokens: preference pairs, and the loss on turns of chats."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from hybridrl.data.examples import (
    PreferencePair,
    assistant_mask,
    build_preference_batch,
    build_supervised_batch,
    tokenize_pairs,
)
from hybridrl.data.parsing import Columns
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message, Row, fingerprint
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tasks import build_sort_digits_rows
from hybridrl.errors import DataError
from tests.data.tokenized import read_row, tokenize_rows

PAIRS = Columns(answer="chosen", rejected="rejected")
CHATS = Columns(prompt=None, answer="chosen", rejected="rejected")
USER = {"role": "user", "content": "1+1="}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"prompt": [USER], "chosen": "2", "rejected": "3"}, PAIRS),
        ({"prompt": [USER], "chosen": [said("2")], "rejected": [said("3")]}, PAIRS),
        ({"prompt": [USER], "chosen": [USER, said("2")], "rejected": [USER, said("3")]}, PAIRS),
        ({"chosen": [USER, said("2")], "rejected": [USER, said("3")]}, CHATS),
        ({"prompt": "x", "chosen": [USER, said("2")], "rejected": [USER, said("3")]}, CHATS),
    ],
)
def test_a_pair_is_text_or_chats_with_their_prompt(
    tmp_path: Path, record: object, columns: Columns
) -> None:
    row = read_row(tmp_path, record, columns)
    assert (row.prompt, row.answer, row.rejected) == ((Message("user", "1+1="),), "2", "3")


@pytest.mark.parametrize(
    ("record", "columns", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, PAIRS, "has no 'rejected'; set data.rejected_key"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, PAIRS, "'rejected' is None, must be"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, PAIRS, "'rejected' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, PAIRS, "are equal: a pair needs two"),
        (
            {"prompt": "a", "chosen": [said("b")], "rejected": [said("b")]},
            PAIRS,
            "are equal: a pair needs two",
        ),
        (
            {"prompt": "a", "chosen": [said("b")], "rejected": "c"},
            PAIRS,
            "'rejected' is 'c', must be a list of messages, as the other answer is",
        ),
        (
            {"chosen": "b", "rejected": "c"},
            CHATS,
            "must be two or more messages, since data.prompt",
        ),
        ({"chosen": [said("b")], "rejected": [said("c")]}, CHATS, "must be two or more messages"),
        (
            {"chosen": [USER, said("b")], "rejected": [USER, USER]},
            CHATS,
            "the last message of 'rejected' is of role 'user', must be the assistant's",
        ),
        (
            {"chosen": [USER, said("b")], "rejected": [said("x"), said("c")]},
            CHATS,
            "'chosen' and 'rejected' differ before their last message",
        ),
        (
            {"prompt": "a", "chosen": [USER, said("b")], "rejected": [USER, said("c")]},
            PAIRS,
            "set data.prompt_key=null to take them as the prompt",
        ),
        ({"chosen": [USER, said("")], "rejected": [USER, said("c")]}, CHATS, "'chosen' is empty"),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line(
    tmp_path: Path, record: object, columns: Columns, problem: str
) -> None:
    with pytest.raises(DataError) as raised:
        read_row(tmp_path, record, columns)
    assert "a.jsonl:1: " in str(raised.value)
    assert problem in str(raised.value)


def pairs_of(*answers: tuple[str, str | None], most: int = 9, drops: bool = False) -> list[str]:
    tokenizer = build_starter_tokenizer()
    rows = [
        Row("12=", good, "s", f"f:{n}", rejected=bad) for n, (good, bad) in enumerate(answers, 1)
    ]
    tokenized = tokenize_rows(rows, tokenizer)
    pairs = tokenize_pairs(tokenized, tokenizer, max_answer_tokens=most, drops_overlong=drops)
    return [pair.row.origin for pair in pairs]


def test_an_answer_has_as_many_tokens_as_a_response_may() -> None:
    assert pairs_of(("12", "21"), ("123", "1"), most=3, drops=True) == ["f:1"]
    with pytest.raises(DataError, match=r"max_response_tokens=3: f:2 \(4 tokens\); set .*tokens=4"):
        pairs_of(("12", "21"), ("1", "123"), most=3)
    with pytest.raises(DataError, match=r"f:1 .* f:2 "):
        pairs_of(("123", "21"), ("1", "123"), most=3, drops=True)


def test_a_pair_without_two_answers_is_refused() -> None:
    with pytest.raises(DataError, match=r"f:2 has no rejected answer; set data.rejected_key"):
        pairs_of(("12", "21"), ("1", None))
    with pytest.raises(DataError, match="f:1: chosen and rejected answer have the same tokens"):
        pairs_of(("1", "1"))


def test_a_batch_has_the_chosen_row_before_the_rejected_one() -> None:
    tokenizer = build_starter_tokenizer()
    (row,) = build_sort_digits_rows(
        1, split="train", seed=0, min_digits=3, max_digits=3, with_rejected=True
    )
    tokenized = tokenize_rows([row], tokenizer)
    pairs: list[PreferencePair] = tokenize_pairs(
        tokenized, tokenizer, max_answer_tokens=4, drops_overlong=False
    )
    batch = build_preference_batch(pairs)
    end = tokenizer.eos_token
    texts = [tokenizer.decode(tokens) for tokens in batch.token_ids_BL.unbind()]
    assert texts == [f"{row.prompt}{row.answer}{end}", f"{row.prompt}{row.rejected}{end}"]
    assert [mask.tolist() for mask in batch.response_mask_BL.unbind()] == [
        [False] * 4 + [True] * 4
    ] * 2


def test_a_rejected_answer_of_the_task_has_one_wrong_digit() -> None:
    make = partial(build_sort_digits_rows, 50, split="train", seed=0, min_digits=1, max_digits=9)
    rows = make(with_rejected=True)
    for row in rows:
        assert row.rejected is not None
        assert sum(a != b for a, b in zip(row.answer, row.rejected, strict=True)) == 1
    plain = make()
    assert [row.prompt for row in plain] == [row.prompt for row in rows]
    assert fingerprint(plain) != fingerprint(rows)


CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>\\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETS = CHATML.replace("m.content }}", "m.content if loop.last else 'gone' }}")
CHAT = (
    Message("user", "hi"),
    Message("assistant", "yé s"),
    Message("user", "and?"),
    Message("assistant", "no"),
    Message("user", "why?"),
)


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase, prompt: str | tuple[Message, ...], *, longest: int = 200
) -> TokenizedRow:
    (row,) = tokenize_rows(
        [Row(prompt, "so", "s", "file:1")],
        tokenizer,
        use_chat_template=True,
        max_prompt_tokens=longest,
        overlong="keep_end",
    )
    return row


def learned(tokenizer: PreTrainedTokenizerBase, row: TokenizedRow, *, all_turns: bool) -> str:
    batch = build_supervised_batch([row], tokenizer, learns_all_turns=all_turns)
    return str(tokenizer.decode(batch.token_ids_BL.values()[batch.response_mask_BL.values()]))


def test_all_turns_are_learned_with_their_end(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = CHATML
    row = tokenize_chat(tokenizer, CHAT)
    assert learned(tokenizer, row, all_turns=True) == "yé s<|end|>no<|end|>so<|end|>"
    assert learned(tokenizer, row, all_turns=False) == "so<|end|>"


def test_a_prompt_that_lost_its_beginning_keeps_its_mask(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = CHATML
    full = tokenize_chat(tokenizer, CHAT)
    row = tokenize_chat(tokenizer, CHAT, longest=len(full.token_ids) - 25)
    assert learned(tokenizer, row, all_turns=True) == " s<|end|>no<|end|>so<|end|>"


def test_text_prompts_have_no_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = CHATML
    assert not assistant_mask(tokenize_chat(tokenizer, "hi"), tokenizer).any()


def test_a_template_that_changes_earlier_turns_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = FORGETS
    with pytest.raises(DataError, match=r"file:1: .* message 2 .* differently .* sft\.turns=last"):
        assistant_mask(tokenize_chat(tokenizer, CHAT), tokenizer)


def chat_of(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def read(folder: Path, messages: object) -> Row:
    return read_row(folder, {"messages": messages}, Columns(prompt="messages", answer=None))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (chat_of(("user", "a")), "must be two or more messages"),
        ("text", "must be two or more messages"),
        (chat_of(("user", "a"), ("user", "b")), "is of role 'user', must be the assistant's"),
        (chat_of(("user", "a"), ("assistant", "")), "'messages[-1].content' is empty"),
    ],
)
def test_a_conversation_without_an_answer_is_named(
    tmp_path: Path, messages: object, problem: str
) -> None:
    with pytest.raises(DataError) as raised:
        read(tmp_path, messages)
    assert "a.jsonl:1: " in str(raised.value)
    assert problem in str(raised.value)


def test_the_last_message_of_a_conversation_is_the_answer(tmp_path: Path) -> None:
    row = read(tmp_path, chat_of(("user", "a"), ("assistant", "b")))
    assert (row.prompt, row.answer) == ((Message("user", "a"),), "b")
