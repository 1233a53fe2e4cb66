from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import jagged, last_turns
from hybridrl.data.starter_tokenizer import EOS_TOKEN, build_starter_tokenizer
from hybridrl.data.tokenizer import decode_responses, load_stop_token_ids, load_tokenizer
from hybridrl.errors import ModelError
from tests.trainer.rollouts import rollouts_of

STARTER = build_starter_tokenizer()


@given(st.text())
def test_every_text_survives_the_starter_tokenizer(text: str) -> None:
    text = text.encode(errors="replace").decode()
    assert STARTER.decode(STARTER(text)["input_ids"]) == text


def test_a_digit_is_one_token() -> None:
    assert len(STARTER("31415=")["input_ids"]) == 6
    assert len(STARTER) == 258


def test_starter_tokenizer_survives_saving_and_loading(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, needs_chat_template=False)
    text = "907= é\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == EOS_TOKEN


def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone does not exist; set model\.path"):
        load_tokenizer(tmp_path / "gone", needs_chat_template=False)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 9}')
    with pytest.raises(ModelError, match=r"it has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path, needs_chat_template=False)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load_tokenizer(tmp_path, needs_chat_template=False)


def test_missing_chat_template_is_rejected_only_if_needed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no chat template; set data\.use_chat_template=false"):
        load_tokenizer(tmp_path, needs_chat_template=True)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, needs_chat_template=True).chat_template


def test_a_tokenizer_needs_an_end_token_but_no_pad_token(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path, needs_chat_template=False).pad_token is None
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(tmp_path, needs_chat_template=False)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, (256,)),
        ({"eos_token_id": 3}, (3, 256)),
        ({"eos_token_id": [7, 256]}, (7, 256)),
        ({}, (256,)),
        ({"eos_token_id": None}, (256,)),
    ],
)
def test_stop_tokens_come_from_tokenizer_and_generation_config(
    tmp_path: Path, content: object, expected: tuple[int, ...]
) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert load_stop_token_ids(tmp_path, STARTER) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[1]", "holds a JSON list"),
        ("[" * 100_000, "nested too deep"),
        ('{"eos_token_id": "</s>"}', "'</s>' is no token"),
        ('{"eos_token_id": [3, null]}', "None is no token"),
        ('{"eos_token_id": [3, true]}', "True is no token"),
        ('{"eos_token_id": [3, 300]}', "eos_token_id=300 is not in the vocabulary of 258"),
        ('{"eos_token_id": -1}', "eos_token_id=-1 is not in the vocabulary"),
    ],
)
def test_a_broken_generation_config_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 258}')
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=rf"generation_config\.json.* {words}"):
        load_stop_token_ids(tmp_path, STARTER)


def test_a_tokenizer_that_ends_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 200}')
    with pytest.raises(ModelError, match=r"with token 256, and the model knows 0 to 199"):
        load_stop_token_ids(tmp_path, STARTER)


def test_responses_are_decoded_without_prompt_and_special_tokens() -> None:
    def row(prompt: str, response: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = STARTER(prompt)["input_ids"]
        mask = [False] * len(ids) + [True] * len(response)
        return torch.tensor(ids + response), torch.tensor(mask)

    digits = STARTER("123")["input_ids"]
    rows = [row("31=", [*digits, 256]), row("5=", []), row("7=", [*digits[:1], 400])]
    tokens, masks = zip(*rows, strict=True)
    rollouts = rollouts_of(tokens, masks, range(3))
    # 400 lies in the padding of the model's embedding, past the tokenizer's vocabulary.
    assert decode_responses(rollouts, STARTER) == ["123", "", "1"]


@given(masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=5))
def test_the_last_turn_is_the_last_run_of_sampled_tokens(masks: list[list[bool]]) -> None:
    kept = last_turns(jagged([torch.tensor(mask) for mask in masks]))

    for mask, row in zip(masks, kept.unbind(), strict=True):
        runs = [(key, len(list(run))) for key, run in groupby(mask)]
        last = next((n for n in reversed(range(len(runs))) if runs[n][0]), None)
        wanted = [n == last for n, (_, length) in enumerate(runs) for _ in range(length)]
        assert row.tolist() == wanted
