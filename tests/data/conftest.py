from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from hybridrl.data.starter_tokenizer import build_starter_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return build_starter_tokenizer()


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
