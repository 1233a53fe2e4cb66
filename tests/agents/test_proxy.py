"""Chats over HTTP: the tokens of a trajectory are those that the sampler returned."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from tests.agents.chat_templates import build_tokenizer
from tests.agents.fake_sampler import FakeSampler
from tests.agents.proxy_clients import (
    TOOL,
    Client,
    require_as_sampled,
    served,
    setting_of,
    tool,
    user,
)

STARTER = build_starter_tokenizer()
QWEN = build_tokenizer("qwen2.5")
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


def _texts(client: Client) -> list[list[str]]:
    """Return the texts of each sequence: of its context, then of its turns."""
    decode = STARTER.decode
    return [
        [decode(s.context), *(decode(turn.token_ids) for turn in s.turns)]
        for s in client.trajectory().sequences
    ]


def test_a_chat_that_goes_on_is_one_sequence_of_tokens() -> None:
    sampler = FakeSampler(STARTER, ["Hé", " 42 "])

    async def chat() -> list[list[str]]:
        async with served(setting_of(sampler)) as client:
            first = await client.ask({"role": "system", "content": "S"}, user("Q"))
            assert first == {"role": "assistant", "refusal": None, "content": "Hé"}
            system = {"role": "system", "content": [{"type": "text", "text": "S"}]}
            await client.ask(system, user("Q"), first, user("More"))
            require_as_sampled(client.trajectory(), sampler)
            return _texts(client)

    assert asyncio.run(chat()) == [
        ["s:S<|end|>u:Q<|end|>a:", "Hé<|end|>", "u:More<|end|>a:", " 42 <|end|>"]
    ]


def test_an_answer_has_usage_and_logprobs() -> None:
    sampler = FakeSampler(STARTER, ["é"])

    async def chat() -> Any:
        async with served(setting_of(sampler)) as client:
            _, answer = await client.post(messages=[user("Q")], logprobs=True, temperature=0.8)
            return answer

    answer = asyncio.run(chat())

    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == sampler.requests[0].sample.logprobs.tolist()
    assert content[2]["token"] == "<|end|>"


def test_calls_of_tools_are_read_and_answered() -> None:
    sampler = FakeSampler(QWEN, [CALL, "3"])

    async def chat() -> list[str]:
        async with served(setting_of(sampler)) as client:
            first = await client.ask(user("1+2?"), tools=[TOOL])
            (call,) = first["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"b": 2, "a": 1}
            assert first["content"] == "I add."
            # As a client writes it again.
            call["function"]["arguments"] = '{"a":1, "b":2}'
            again = {"role": "assistant", "content": "I add.\n", "tool_calls": [call]}
            await client.ask(user("1+2?"), again, tool("3<|im_end|>"), tools=[TOOL])
            (sequence,) = client.trajectory().sequences
            require_as_sampled(client.trajectory(), sampler)
            return [QWEN.decode(t) for t in (sequence.context, sequence.turns[1].token_ids)]

    context, increment = asyncio.run(chat())

    assert '"description": "Adds."' in context
    assert increment == (
        "\n<|im_start|>user\n<tool_response>\n3< |im_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", CALL + "<tool_call>", "No call"])
def test_a_call_that_cannot_be_read_is_text(text: str) -> None:
    async def chat() -> Any:
        async with served(setting_of(FakeSampler(QWEN, [text]))) as client:
            return await client.ask(user("Q"), tools=[TOOL])

    assert asyncio.run(chat()) == {"role": "assistant", "refusal": None, "content": text}
