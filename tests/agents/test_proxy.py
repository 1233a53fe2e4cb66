from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.agents.chat import COMPLETIONS, RefusedRequest, read_request
from hybridrl.agents.conversation import Conversation
from hybridrl.agents.proxy import _fields_of
from hybridrl.agents.proxy_server import MODEL, Chats, ProxyServer, serve
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.pixels import source_of_bytes
from hybridrl.data.rows import IMAGE_MARK, Message
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.sampler import Sample, SampleRequest
from tests.agents.chat_templates import TOKENIZERS, build_tokenizer
from tests.agents.fake_sampler import (
    PROMPT,
    ROW,
    FakeSampler,
    conversation_setting,
    require_as_sampled,
)
from tests.agents.pictures_file import draw, to_file
from tests.agents.test_images import SETTINGS
from tests.seeing import IMAGE_PAD
from tests.seeing import build_tokenizer as build_seeing_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
QWEN = TOKENIZERS["qwen2.5"]
STARTER = build_starter_tokenizer()
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Client:
    session: aiohttp.ClientSession
    server: ProxyServer
    key: str
    conversation: Conversation
    decode: Callable[[Tensor], str]

    async def post(self, **fields: object) -> tuple[int, Any]:
        return await self.post_to("chat/completions", {"model": MODEL, **fields})

    async def post_to(self, path: str, body: object) -> tuple[int, Any]:
        url = f"{self.server.address}/{path}"
        async with self.session.post(url, json=body, headers=self.headers) as response:
            return response.status, await response.json()

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def choose(self, *messages: Mapping[str, object], **fields: object) -> Any:
        status, answer = await self.post(messages=messages, **fields)
        assert status == 200, answer
        (choice,) = answer["choices"]
        return choice

    async def ask(self, *messages: Mapping[str, object], **fields: object) -> Any:
        return (await self.choose(*messages, **fields))["message"]

    def texts(self) -> list[list[str]]:
        """The texts of each sequence: of its context, then of its turns."""
        return [
            [self.decode(s.context), *(self.decode(turn.token_ids) for turn in s.turns)]
            for s in self.conversation.to_trajectory().sequences
        ]


@asynccontextmanager
async def served(sampler: FakeSampler, **changes: Any) -> AsyncIterator[Client]:
    setting = conversation_setting(sampler, temperature=0.8, **changes)
    conversation = Conversation(PROMPT, setting)
    async with serve(setting) as server, aiohttp.ClientSession() as session:
        key = server.open(Chats(conversation, setting))
        yield Client(session, server, key, conversation, sampler.tokenizer.decode)


def user(text: str) -> Mapping[str, object]:
    return {"role": "user", "content": text}


def tool(text: str) -> Mapping[str, object]:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


@pytest.mark.parametrize("max_tokens", [None, 9])
async def test_an_answer_ends_before_a_stop_string(max_tokens: int | None) -> None:
    sampler = FakeSampler(STARTER, ["Hé\nObs: made up", "42"])
    async with served(sampler) as client:
        stops = {"stop": ["bs", "Obs", "up"], "max_tokens": max_tokens}
        choice = await client.choose(user("Q"), logprobs=True, temperature=0.8, **stops)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Hé")
        content = choice["logprobs"]["content"]
        assert "".join(each["token"] for each in content)[-4:] == "\nObs"
        await client.ask(user("Q"), choice["message"], user("Seen"), stop="x")
    trajectory = client.conversation.to_trajectory()
    assert trajectory.ended == "answer"
    assert client.texts() == [["u:Q<|end|>a:", "Hé\nObs", "<|end|>u:Seen<|end|>a:", "42<|end|>"]]
    logprobs = [t.logprobs.tolist() for t in trajectory.turns if t.logprobs is not None]
    sampled = [request.sample.logprobs.tolist() for request in sampler.requests]
    assert logprobs == [sampled[0][:7], sampled[1]]
    assert [each["logprob"] for each in content] == logprobs[0]
    row = trajectory.to_sample()
    assert row.versions_L[row.is_sampled].tolist() == [0, *[1] * 6, 1, *[2] * (len(sampled[1]) - 1)]


async def test_an_answer_has_usage_and_the_logprob_of_its_end() -> None:
    sampler = FakeSampler(STARTER, ["é"])
    async with served(sampler) as client:
        _, answer = await client.post(messages=[user("Q")], logprobs=True, temperature=0.8)
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
    content = answer["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == sampler.requests[0].sample.logprobs.tolist()
    assert content[2]["token"] == "<|end|>"


async def test_calls_of_tools_are_read_and_answered() -> None:
    sampler = FakeSampler(QWEN, [CALL, "3"])
    async with served(sampler) as client:
        first = await client.ask(user("1+2?"), tools=[TOOL])
        (call,) = first["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"b": 2, "a": 1}
        assert first["content"] == "I add."
        # As a client writes it again.
        call["function"]["arguments"] = '{"a":1, "b":2}'
        again = {"role": "assistant", "content": "I add.\n", "tool_calls": [call]}
        await client.ask(user("1+2?"), again, tool("3<|im_end|>"), tools=[TOOL])
    trajectory = client.conversation.to_trajectory()
    assert (trajectory.num_tool_calls, trajectory.num_tool_errors) == (1, 0)
    require_as_sampled(trajectory, sampler)
    ((context, _, increment, _),) = client.texts()
    assert '"description": "Adds."' in context
    assert increment == (
        "\n<|im_start|>user\n<tool_response>\n3< |im_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", CALL + "<tool_call>", "No call"])
async def test_a_call_that_cannot_be_read_is_text(text: str) -> None:
    async with served(FakeSampler(QWEN, [text])) as client:
        answer = await client.ask(user("Q"), tools=[TOOL])
    assert answer == {"role": "assistant", "refusal": None, "content": text}


async def test_an_edited_history_begins_a_sequence() -> None:
    sampler = FakeSampler(STARTER, ["Hé ", "2", "3", "4"])
    system = {"role": "system", "content": [{"type": "text", "text": "S"}]}
    async with served(sampler) as client:
        first = await client.ask({"role": "system", "content": "S"}, user("Q"))
        assert first == {"role": "assistant", "refusal": None, "content": "Hé"}
        second = await client.ask(system, user("Q"), first, user("More"))
        await client.ask(user("Summary"))
        # Goes on from the first answer once more, whose tokens are not rendered again.
        await client.ask(system, user("Q"), first, user("Else"))
    assert second["content"] == "2"
    require_as_sampled(client.conversation.to_trajectory(), sampler)
    assert client.texts() == [
        ["s:S<|end|>u:Q<|end|>a:", "Hé <|end|>", "u:More<|end|>a:", "2<|end|>"],
        ["u:Summary<|end|>a:", "3<|end|>"],
        ["s:S<|end|>u:Q<|end|>a:Hé <|end|>u:Else<|end|>a:", "4<|end|>"],
    ]


@pytest.mark.parametrize(("history", "num_sequences"), [("keep", 1), ("branch", 2)])
async def test_history_that_a_template_rewrites_may_branch(
    history: str, num_sequences: int
) -> None:
    sampler = FakeSampler(TOKENIZERS["qwen3"], ["1", "2"])
    async with served(sampler, history=history) as client:
        first = await client.ask(user("Q"))
        await client.ask(user("Q"), first, user("More"))
    require_as_sampled(client.conversation.to_trajectory(), sampler)
    assert len(client.texts()) == num_sequences


async def test_requests_at_the_same_time_have_sequences_of_their_own() -> None:
    sampler = FakeSampler(STARTER, ["1", "1", "1", "2", "2", "2"])
    async with served(sampler) as client:
        firsts = await asyncio.gather(*(client.ask(user("Q")) for _ in range(3)))
        await asyncio.gather(*(client.ask(user("Q"), first, user("M")) for first in firsts))
    require_as_sampled(client.conversation.to_trajectory(), sampler)
    assert client.texts() == [["u:Q<|end|>a:", "1<|end|>", "u:M<|end|>a:", "2<|end|>"]] * 3


def look(*parts: str | bytes) -> Mapping[str, object]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": source_of_bytes(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


@pytest.mark.usefixtures("ray_cluster")
async def test_images_of_a_chat_stay_with_their_sequence() -> None:
    tokenizer = build_seeing_tokenizer()
    template = TurnTemplate(tokenizer, stop_token_ids=[2], images=SETTINGS)
    one, two = (to_file(draw(*size, 1)) for size in ((30, 30), (60, 60)))
    sampler = FakeSampler(tokenizer, ["a", "b", "c", "d"])
    async with served(sampler, template=template) as client:
        first = look(one, "what \ufffc?")
        chat = [first, await client.ask(first), look("and ", two, one)]
        chat += [await client.ask(*chat), user("why \ufffc?")]
        await client.ask(*chat)
        await client.ask(*chat[:2], look(two))  # another continuation of the same beginning
        for bad, reason in ((two[:-3000], "cannot be read"), (b"x", "is no image")):
            status, body = await client.post(messages=[look(bad)])
            assert (status, body["error"]["param"]) == (400, "messages")
            assert reason in body["error"]["message"]
    trajectory = client.conversation.to_trajectory()
    require_as_sampled(trajectory, sampler)
    assert [request.num_images for request in sampler.requests] == [1, 3, 3, 2]
    sizes = [[image.num_tokens for image in s.images] for s in trajectory.sequences]
    assert sizes == [[1, 4, 1], [1, 4]]
    for sequence, numbers in zip(trajectory.sequences, sizes, strict=True):
        tokens = torch.cat([sequence.context, *(turn.token_ids for turn in sequence.turns)])
        assert int((tokens == IMAGE_PAD).sum()) == sum(numbers)


def test_a_program_gets_the_images_and_columns_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    messages = (Message("user", f"{IMAGE_MARK}or {IMAGE_MARK}?"),)
    images = (str(tmp_path / "a.png"), "data:image/png;base64,eQ==")
    fields = _fields_of(replace(ROW, prompt=messages, images=images, own='{"level": 3}'))
    assert (fields["answer"], fields["columns"]) == ("42", {"level": 3})
    prompt: Any = fields["prompt"]
    assert prompt[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/*;base64,eA=="}},
        {"type": "text", "text": "or "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,eQ=="}},
        {"type": "text", "text": "?"},
    ]


async def test_a_client_that_hangs_up_may_ask_again() -> None:
    class Slow(FakeSampler):
        async def answer(self, request: SampleRequest) -> list[Sample]:
            await asyncio.sleep(0.2)
            return await FakeSampler.answer(self, request)

    sampler = Slow(STARTER, ["1", "2"])
    async with served(sampler) as client:
        first = await client.ask(user("Q"))
        again = (user("Q"), first, user("M"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.ask(*again), timeout=0.1)
        await asyncio.sleep(0.2)
        await client.ask(*again)
    require_as_sampled(client.conversation.to_trajectory(), sampler)
    assert client.texts() == [
        ["u:Q<|end|>a:", "1<|end|>"],
        ["u:Q<|end|>a:1<|end|>u:M<|end|>a:", "2<|end|>"],
    ]


Q = {"messages": [{"role": "user", "content": "Q"}]}
REFUSED: list[tuple[dict[str, object], int, str | None, str]] = [
    ({"model": "gpt"}, 404, "model", "there is no model 'gpt'; the only one is 'policy'"),
    ({}, 400, "messages", "there are no messages"),
    ({"messages": "Q"}, 400, "messages", "must be a list of objects"),
    ({"messages": [{"role": "robot"}]}, 400, "messages", "role 'robot', must be one of"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "URL"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages", "text"),
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


async def test_a_bad_request_is_answered_with_what_is_wrong() -> None:
    async with served(FakeSampler(STARTER, ["42"])) as client:
        for fields, status, param, message in REFUSED:
            got, body = await client.post(**fields)
            assert (got, body["error"]["param"]) == (status, param), body
            assert message in body["error"]["message"]
        assert (await client.ask(user("Q")))["content"] == "42"
        assert client.server.num_refused == len(REFUSED)


async def test_a_program_may_reward_its_turns() -> None:
    async with served(FakeSampler(STARTER, ["1", "42"])) as client:
        status, refused = await client.post_to("reward", {"reward": 1.0})
        assert (status, refused["error"]["param"]) == (400, "reward")
        assert "no turn was sampled yet" in refused["error"]["message"]
        first = await client.ask(user("Q"))
        assert await client.post_to("reward", {"reward": 0.25}) == (200, {})
        await client.ask(user("Q"), first, user("M"))
        for value in (0.5, True):
            assert await client.post_to("reward", {"reward": value}) == (200, {})
        for bad in (None, "much", [1], float("inf"), 10**400):
            status, refused = await client.post_to("reward", {"reward": bad})
            assert (status, refused["error"]["param"]) == (400, "reward"), refused
        assert (await client.post_to("reward", [1.0]))[0] == 400
        assert (await replace(client, key="other").post_to("reward", {"reward": 1}))[0] == 401
    turns = client.conversation.to_trajectory().turns
    assert [None if t.rewards is None else t.rewards.tolist() for t in turns] == [
        [0.0, 0.25],
        None,
        [0.0, 0.0, 1.5],
    ]


async def test_players_of_a_game_are_told_apart_and_rewarded_each() -> None:
    async with served(FakeSampler(STARTER, ["1", "22", "3"])) as client:
        white, black = f"{MODEL}:0", f"{MODEL}:1"
        _, first = await client.post(messages=[user("Q")], model=white)
        await client.ask(user("R"), model=black)
        wrong = [f"{MODEL}:{player}" for player in ("", "x", "128", "9" * 5000)]
        names: list[object] = [*wrong, "other:1", 7, [], None]
        for name in names:
            status, refused = await client.post_to("reward", {"reward": 1, "model": name})
            assert (status, refused["error"]["param"]) == (404, "model"), name
        with pytest.raises(ValueError, match="a number from 0 to 127, not 128"):
            await client.conversation.sample(128)
        refusal = (400, "the reward is 1: no turn of player 2 was sampled yet")
        status, refused = await client.post_to("reward", {"reward": 1, "model": f"{MODEL}:2"})
        assert status == refusal[0]
        assert refusal[1] in refused["error"]["message"]
        assert await client.post_to("reward", {"reward": 0.5, "model": white}) == (200, {})
        said = first["choices"][0]["message"]
        await client.ask(user("Q"), said, user("S"), model=white)
        for reward, name in ((-1, black), (1, white)):
            assert await client.post_to("reward", {"reward": reward, "model": name}) == (200, {})
    sample = client.conversation.to_trajectory().to_sample()
    columns = (sample.is_sampled, sample.players, sample.rewards)
    tokens = [*zip(*(column.tolist() for column in columns if column is not None), strict=True)]
    sampled = [(player, reward) for is_sampled, player, reward in tokens if is_sampled]
    black_turn = [(1, 0.0), (1, 0.0), (1, -1.0)]
    assert sampled == [*black_turn, (0, 0.0), (0, 0.5), (0, 0.0), (0, 1.0)]
    assert {(p, r) for is_sampled, p, r in tokens if not is_sampled} == {(0, 0.0)}


async def test_a_chat_that_has_no_tokens_is_refused() -> None:
    sampler = FakeSampler(build_tokenizer("qwen2.5", template=""), [])
    lone_surrogate = {"type": "function", "function": {"name": "\ud800"}}
    async with served(sampler) as client:
        assert (await client.post(messages=[user("Q")]))[0] == 400
    async with served(FakeSampler(QWEN, [])) as client:
        assert (await client.post(messages=[user("Q")], tools=[lone_surrogate]))[0] == 500


@pytest.mark.parametrize(
    ("method", "path", "data", "key", "status"),
    [
        ("POST", "/chat/completions", b"{}", "wrong", 401),
        ("GET", "/models", None, "wrong", 401),
        ("POST", "/chat/completions", b"{", "", 400),
        ("POST", "/chat/completions", b"[" * 100_000, "", 400),
        ("POST", "/chat/completions", b" " * (1 << 20), "", 413),
        ("POST", "/embeddings", b"{}", "", 404),
        ("POST", "/responses", b"{", "", 400),
        ("POST", "/messages", b"{}", "wrong", 401),
        ("POST", "/messages", b" " * (1 << 20), "", 413),
        ("GET", "/chat/completions", None, "", 405),
    ],
)
async def test_a_request_of_another_kind_is_refused(
    method: str, path: str, data: bytes | None, key: str, status: int
) -> None:
    async with served(FakeSampler(STARTER, [])) as client:
        headers = {"Authorization": f"Bearer {key or client.key}"}
        url = client.server.address + path
        body = None if data is None else BytesIO(data)
        async with client.session.request(method, url, data=body, headers=headers) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]


async def test_models_are_listed_on_loopback_alone_and_the_key_may_be_in_the_path() -> None:
    async with served(FakeSampler(STARTER, [])) as client:
        assert client.server.address.startswith("http://127.0.0.1:")
        url = client.server.address.replace("/v1", f"/{client.key}/v1/models")
        async with client.session.get(url) as response:
            (model,) = (await response.json())["data"]
    assert model["id"] == "policy"


async def test_a_turn_that_fills_the_conversation_ends_it() -> None:
    async with served(FakeSampler(STARTER, ["1" * 8]), max_new_tokens=6) as client:
        choice = await client.choose(user("Q"), max_tokens=7)
        assert choice["finish_reason"] == "length"
        assert client.conversation.to_trajectory().ended == "tokens"
        status, body = await client.post(messages=[user("Q")])
        assert (status, body["error"]["code"]) == (400, "conversation_ended")


async def test_a_client_library_of_openai_is_served() -> None:
    openai = pytest.importorskip("openai", reason="comes with SGLang")
    sampler = FakeSampler(QWEN, [CALL, "3"])
    async with served(sampler) as client:
        api = openai.AsyncOpenAI(base_url=client.server.address, api_key=client.key)
        chat = [user("1+2?")]
        ask = partial(api.chat.completions.create, model="policy", tools=[TOOL])
        first = (await ask(messages=chat)).choices[0].message
        chat += [first.model_dump(exclude_none=True), tool("3")]
        stream = await ask(messages=chat, stream=True, logprobs=True)
        text, end = [chunk async for chunk in stream]
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
            await ask(messages=chat, model="gpt")
        with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
            await ask(messages=chat, extra_headers={"Authorization": "Bearer no"})
        await api.close()
    require_as_sampled(client.conversation.to_trajectory(), sampler)
    assert len(client.texts()) == 1
    assert text.choices[0].delta.content == "3"
    assert end.choices[0].finish_reason == "stop"
    assert [each.token for each in end.choices[0].logprobs.content] == ["3", "<|im_end|>"]


async def test_a_stream_has_calls_and_usage() -> None:
    sampler = FakeSampler(QWEN, [CALL])
    async with served(sampler) as client:
        fields = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
        body = {"model": "policy", "messages": [user("Q")], **fields}
        url = f"{client.server.address}/chat/completions"
        async with client.session.post(url, json=body, headers=client.headers) as response:
            assert response.content_type == "text/event-stream"
            *events, done, empty = (await response.text()).split("\n\n")
    first, end, usage = (json.loads(event.removeprefix("data: ")) for event in events)
    assert (done, empty) == ("data: [DONE]", "")
    assert first["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    (asked,) = sampler.requests
    prompt, completion = len(asked.context), len(asked.sample.token_ids)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    assert usage["usage"] == {**counts, "total_tokens": prompt + completion}


TOOL_CALL = '<tool_call>{"name": "add", "arguments": {"text": "TEXT"}}</tool_call>'
Step = tuple[int, str, str, int | None]
"""The chat that goes on, role and text of the new message, and the limit of the answer."""


async def _play(sampler: FakeSampler, steps: list[Step]) -> Trajectory:
    """Continue any chat that is known by then, the empty one among them."""
    setting = conversation_setting(sampler, max_new_tokens=1500, temperature=0.8)
    conversation = Conversation(PROMPT, setting)
    chats = Chats(conversation, setting)
    known: list[list[Any]] = [[]]
    for number, role, text, limit in steps:
        chat = [*known[number % len(known)], {"role": role, "content": text}]
        body = {"model": "m", "messages": chat, "tools": [TOOL], "max_tokens": limit}
        try:
            request = read_request(json.dumps(body).encode(), model="m", temperature=0.8, top_p=1.0)
            answer = await chats.ask(request)
        except RefusedRequest:  # a limit, or a template that does not have the role there
            continue
        (choice,) = COMPLETIONS.answer(answer, request, {})["choices"]
        known.append([*chat, choice["message"]])
    return conversation.to_trajectory()


@settings(max_examples=150)
@given(
    family=st.sampled_from(sorted(TOKENIZERS)),
    answers=st.lists(st.text(max_size=8), min_size=8, max_size=8),
    steps=st.lists(
        st.tuples(
            st.integers(0, 7),
            st.sampled_from(("user", "user", "tool")),
            st.text(max_size=8),
            st.none() | st.integers(1, 60),
        ),
        max_size=8,
    ),
)
def test_trained_tokens_of_chats_are_the_sampled_tokens(
    family: str, answers: list[str], steps: list[Step]
) -> None:
    script = [text if len(text) % 2 else TOOL_CALL.replace("TEXT", text) for text in answers]
    sampler = FakeSampler(TOKENIZERS[family], script)
    trajectory = asyncio.run(_play(sampler, steps))
    if sampler.requests:
        require_as_sampled(trajectory, sampler)
    row = trajectory.to_sample()
    assert row.is_sampled is not None
    sampled = [request.sample for request in sampler.requests]
    assert int(row.is_sampled.sum()) == sum(len(sample.token_ids) for sample in sampled)
    assert row.context is not None
    # The context that was begun first need not be the first one here: last turns order sequences.
    longest = max(len(sequence.context) for sequence in trajectory.sequences)
    assert len(row.context) + len(row.token_ids) <= longest + 1500
