"""The loss on the assistant's turns of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from hybridrl.data.examples import assistant_mask, build_supervised_batch
from hybridrl.data.parsing import Columns
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message, Row
from hybridrl.errors import DataError
from tests.data.tokenized import read_row, tokenize_rows

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


def tokenize(
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
    row = tokenize(tokenizer, CHAT)
    assert learned(tokenizer, row, all_turns=True) == "yé s<|end|>no<|end|>so<|end|>"
    assert learned(tokenizer, row, all_turns=False) == "so<|end|>"


def test_a_prompt_that_lost_its_beginning_keeps_its_mask(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = CHATML
    full = tokenize(tokenizer, CHAT)
    row = tokenize(tokenizer, CHAT, longest=len(full.token_ids) - 25)
    assert learned(tokenizer, row, all_turns=True) == " s<|end|>no<|end|>so<|end|>"


def test_text_prompts_have_no_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = CHATML
    assert not assistant_mask(tokenize(tokenizer, "hi"), tokenizer).any()


def test_a_template_that_changes_earlier_turns_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = FORGETS
    with pytest.raises(DataError, match=r"file:1: .* message 2 .* differently .* sft\.turns=last"):
        assistant_mask(tokenize(tokenizer, CHAT), tokenizer)


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def read(folder: Path, messages: object) -> Row:
    return read_row(folder, {"messages": messages}, Columns(prompt="messages", answer=None))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (said(("user", "a")), "must be two or more messages"),
        ("text", "must be two or more messages"),
        (said(("user", "a"), ("user", "b")), "is of role 'user', must be the assistant's"),
        (said(("user", "a"), ("assistant", "")), "'messages[-1].content' is empty"),
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
    row = read(tmp_path, said(("user", "a"), ("assistant", "b")))
    assert (row.prompt, row.answer) == ((Message("user", "a"),), "b")
