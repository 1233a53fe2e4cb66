"""Chats over HTTP: the tokens of a trajectory are those that the sampler returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import Any

import pytest
from torch import Tensor

from hybridrl.agents.templates import History
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.images import Images
from hybridrl.sampler import RequestParams, Sample
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


@pytest.mark.parametrize("max_tokens", [None, 9])
def test_an_answer_ends_before_a_stop_string(max_tokens: int | None) -> None:
    sampler = FakeSampler(STARTER, ["Hé\nObs: made up", "42"])

    async def chat() -> tuple[list[list[str]], list[list[float]]]:
        async with served(setting_of(sampler)) as client:
            stops = {"stop": ["Obs", "up"], "max_tokens": max_tokens}
            _, answer = await client.post(messages=[user("Q")], logprobs=True, **stops)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == "Hé"
            assert "".join(each["token"] for each in choice["logprobs"]["content"])[-4:] == "\nObs"
            await client.ask(user("Q"), choice["message"], user("Seen"), stop="x")
            (sequence,) = client.trajectory().sequences
            assert client.trajectory().ended == "answer"
            logprobs = [t.logprobs.tolist() for t in sequence.turns if t.logprobs is not None]
            return _texts(client), logprobs

    texts, logprobs = asyncio.run(chat())
    assert texts == [["u:Q<|end|>a:", "Hé\nObs", "<|end|>u:Seen<|end|>a:", "42<|end|>"]]
    sampled = [request.sample.logprobs.tolist() for request in sampler.requests]
    assert logprobs == [sampled[0][:7], sampled[1]]


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
            trajectory = client.trajectory()
            assert (trajectory.num_tool_calls, trajectory.num_tool_errors) == (1, 0)
            (sequence,) = trajectory.sequences
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


def test_an_edited_history_begins_a_sequence() -> None:
    sampler = FakeSampler(STARTER, ["1", "2", "3", "4"])

    async def chat() -> list[list[str]]:
        async with served(setting_of(sampler)) as client:
            first = await client.ask(user("Q"))
            second = await client.ask(user("Q"), first, user("More"))
            await client.ask(user("Summary"))
            # Goes on from the first answer once more, whose tokens are not rendered again.
            await client.ask(user("Q"), first, user("Else"))
            assert second["content"] == "2"
            require_as_sampled(client.trajectory(), sampler)
            return _texts(client)

    assert asyncio.run(chat()) == [
        ["u:Q<|end|>a:", "1<|end|>", "u:More<|end|>a:", "2<|end|>"],
        ["u:Summary<|end|>a:", "3<|end|>"],
        ["u:Q<|end|>a:1<|end|>u:Else<|end|>a:", "4<|end|>"],
    ]


@pytest.mark.parametrize(("history", "num_sequences"), [("keep", 1), ("branch", 2)])
def test_history_that_a_template_rewrites_may_branch(history: History, num_sequences: int) -> None:
    sampler = FakeSampler(build_tokenizer("qwen3"), ["1", "2"])

    async def chat() -> int:
        async with served(setting_of(sampler, history=history)) as client:
            first = await client.ask(user("Q"))
            await client.ask(user("Q"), first, user("More"))
            require_as_sampled(client.trajectory(), sampler)
            return len(client.trajectory().sequences)

    assert asyncio.run(chat()) == num_sequences


def test_requests_at_the_same_time_have_sequences_of_their_own() -> None:
    sampler = FakeSampler(STARTER, ["1", "1", "1", "2", "2", "2"])

    async def chat() -> list[list[str]]:
        async with served(setting_of(sampler)) as client:
            firsts = await asyncio.gather(*(client.ask(user("Q")) for _ in range(3)))
            await asyncio.gather(*(client.ask(user("Q"), first, user("M")) for first in firsts))
            require_as_sampled(client.trajectory(), sampler)
            return _texts(client)

    turns = ["u:Q<|end|>a:", "1<|end|>", "u:M<|end|>a:", "2<|end|>"]
    assert asyncio.run(chat()) == [turns] * 3


def test_an_answer_that_a_request_cuts_is_closed_before_the_next() -> None:
    sampler = FakeSampler(STARTER, ["12345", "6"])

    async def chat() -> list[list[str]]:
        async with served(setting_of(sampler)) as client:
            _, answer = await client.post(messages=[user("Q")], max_tokens=2)
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "length"
            await client.ask(user("Q"), choice["message"], user("M"))
            return _texts(client)

    assert asyncio.run(chat()) == [
        ["u:Q<|end|>a:", "12", "<|end|>u:M<|end|>a:", "6<|end|>"],
    ]


def test_a_client_that_hangs_up_may_ask_again() -> None:
    class Slow(FakeSampler):
        async def sample(
            self,
            token_ids: Sequence[int] | Tensor,
            params: RequestParams,
            *,
            key: int,
            images: Images = (),
        ) -> Sample:
            await asyncio.sleep(0.2)
            return await super().sample(token_ids, params, key=key)

    sampler = Slow(STARTER, ["1", "2"])

    async def chat() -> list[list[str]]:
        async with served(setting_of(sampler)) as client:
            first = await client.ask(user("Q"))
            again = (user("Q"), first, user("M"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.ask(*again), timeout=0.1)
            await asyncio.sleep(0.2)
            await client.ask(*again)
            require_as_sampled(client.trajectory(), sampler)
            return _texts(client)

    assert asyncio.run(chat()) == [
        ["u:Q<|end|>a:", "1<|end|>"],
        ["u:Q<|end|>a:1<|end|>u:M<|end|>a:", "2<|end|>"],
    ]


Q = {"messages": [{"role": "user", "content": "Q"}]}
REFUSED: list[tuple[dict[str, object], int, str | None, str]] = [
    ({"model": "gpt"}, 404, "model", "there is no model 'gpt'; the only one is 'policy'"),
    ({}, 400, "messages", "there are no messages"),
    ({"messages": "Q"}, 400, "messages", "must be a list of objects"),
    ({"messages": [{"role": "robot"}]}, 400, "messages", "role 'robot', must be one of"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, 400, "messages", "list of calls"),
    ({**Q, "n": 2}, 400, "n", "n is 2, and can be 1 alone"),
    ({**Q, "temperature": 0}, 400, "temperature", "can be 0.8 alone"),
    ({**Q, "stop": ["x", ""]}, 400, "stop", "none of them empty"),
    ({**Q, "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({**Q, "tools": [{}]}, 400, "tools", "no function"),
    ({**Q, "tool_choice": {"type": "function"}}, 400, "tool_choice", "must be one of auto"),
    ({**Q, "response_format": {"type": "json_object"}}, 400, "response_format", "alone"),
    ({**Q, "audio": {}}, 400, "audio", "audio is not supported"),
]


def test_a_bad_request_is_answered_with_what_is_wrong() -> None:
    async def chat() -> int:
        async with served(setting_of(FakeSampler(STARTER, ["42"]))) as client:
            for fields, status, param, message in REFUSED:
                got, body = await client.post(**fields)
                assert (got, body["error"]["param"]) == (status, param), body
                assert message in body["error"]["message"]
            assert (await client.ask(user("Q")))["content"] == "42"
            return client.server.num_refused

    assert asyncio.run(chat()) == len(REFUSED)


def test_a_chat_that_has_no_tokens_is_refused() -> None:
    sampler = FakeSampler(build_tokenizer("qwen2.5", template=""), [])
    lone_surrogate = {"type": "function", "function": {"name": "\ud800"}}

    async def chat() -> list[int]:
        async with served(setting_of(sampler)) as client:
            empty, _ = await client.post(messages=[user("Q")])
        sampler.tokenizer = QWEN
        async with served(setting_of(sampler)) as client:
            broken, _ = await client.post(messages=[user("Q")], tools=[lone_surrogate])
            return [empty, broken]

    assert asyncio.run(chat()) == [400, 500]


@pytest.mark.parametrize(
    ("method", "path", "data", "key", "status"),
    [
        ("POST", "/chat/completions", b"{}", "wrong", 401),
        ("GET", "/models", None, "wrong", 401),
        ("POST", "/chat/completions", b"{", "", 400),
        ("POST", "/chat/completions", b"[" * 100_000, "", 400),
        ("POST", "/chat/completions", b" " * (1 << 20), "", 413),
        ("POST", "/responses", b"{}", "", 404),
        ("GET", "/chat/completions", None, "", 405),
    ],
)
def test_a_request_of_another_kind_is_refused(
    method: str, path: str, data: bytes | None, key: str, status: int
) -> None:
    async def call() -> tuple[int, Any]:
        async with served(setting_of(FakeSampler(STARTER, []))) as client:
            headers = {"Authorization": f"Bearer {key or client.key}"}
            url = client.server.address + path
            body = None if data is None else BytesIO(data)
            async with client.session.request(method, url, data=body, headers=headers) as response:
                return response.status, await response.json()

    got, body = asyncio.run(call())

    assert got == status
    assert body["error"]["message"]


def test_models_are_listed_and_the_key_may_be_in_the_path() -> None:
    async def call() -> Any:
        async with served(setting_of(FakeSampler(STARTER, []))) as client:
            url = client.server.address.replace("/v1", f"/{client.key}/v1/models")
            async with client.session.get(url) as response:
                return await response.json()

    (model,) = asyncio.run(call())["data"]
    assert model["id"] == "policy"


def test_a_turn_that_fills_the_conversation_ends_it() -> None:
    sampler = FakeSampler(STARTER, ["1" * 8])

    async def chat() -> list[str]:
        async with served(setting_of(sampler, max_new_tokens=6)) as client:
            _, answer = await client.post(messages=[user("Q")], max_tokens=7)
            ended = [answer["choices"][0]["finish_reason"], client.trajectory().ended]
            status, body = await client.post(messages=[user("Q")])
            assert status == 400
            return [*ended, body["error"]["code"]]

    assert asyncio.run(chat()) == ["length", "tokens", "conversation_ended"]


def test_the_server_listens_on_the_loopback_address_alone() -> None:
    async def address() -> str:
        async with served(setting_of(FakeSampler(STARTER, []))) as client:
            return client.server.address

    assert asyncio.run(address()).startswith("http://127.0.0.1:")


def test_a_client_library_of_openai_is_served() -> None:
    openai = pytest.importorskip("openai", reason="comes with SGLang")
    sampler = FakeSampler(QWEN, [CALL, "3"])

    async def chat() -> Any:
        async with served(setting_of(sampler)) as client:
            api = openai.AsyncOpenAI(base_url=client.server.address, api_key=client.key)
            chat = [user("1+2?")]
            ask = partial(api.chat.completions.create, model="policy", tools=[TOOL])
            first = (await ask(messages=chat)).choices[0].message
            chat += [first.model_dump(exclude_none=True), tool("3")]
            stream = await ask(messages=chat, stream=True, logprobs=True)
            chunks = [chunk async for chunk in stream]
            with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
                await ask(messages=chat, model="gpt")
            with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
                await ask(messages=chat, extra_headers={"Authorization": "Bearer no"})
            await api.close()
            require_as_sampled(client.trajectory(), sampler)
            assert len(client.trajectory().sequences) == 1
            return chunks

    text, end = asyncio.run(chat())
    assert text.choices[0].delta.content == "3"
    assert end.choices[0].finish_reason == "stop"
    assert [each.token for each in end.choices[0].logprobs.content] == ["3", "<|im_end|>"]


def test_a_stream_has_calls_and_usage() -> None:
    sampler = FakeSampler(QWEN, [CALL])

    async def chat() -> str:
        async with served(setting_of(sampler)) as client:
            fields = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
            body = {"model": "policy", "messages": [user("Q")], **fields}
            url = f"{client.server.address}/chat/completions"
            async with client.session.post(url, json=body, headers=client.headers) as response:
                assert response.content_type == "text/event-stream"
                return await response.text()

    *events, done, empty = asyncio.run(chat()).split("\n\n")
    first, end, usage = (json.loads(event.removeprefix("data: ")) for event in events)

    assert (done, empty) == ("data: [DONE]", "")
    assert first["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens"] == len(sampler.requests[0].sample.token_ids)
