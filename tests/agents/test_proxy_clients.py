"""The proxy is asked by the providers' own clients; trained is what was sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridrl.agents.templates import TurnTemplate
from hybridrl.data.pixels import source_of_bytes
from tests.agents.fake_sampler import FakeSampler, require_as_sampled
from tests.agents.pictures_file import draw, to_file
from tests.agents.test_images import SETTINGS
from tests.agents.test_proxy import CALL, QWEN, STARTER, TOOL, Client, served
from tests.seeing import build_tokenizer as build_seeing_tokenizer

SCHEMA = TOOL["function"]["parameters"]  # type: ignore[index]
OWN_TOOL = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
ITS_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def openai_of(client: Client) -> Any:
    openai = pytest.importorskip("openai", reason="comes with SGLang")
    return openai.AsyncOpenAI(base_url=client.server.address, api_key=client.key, max_retries=0)


def anthropic_of(client: Client) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the extra dev is not installed")
    url = client.server.address.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=client.key, max_retries=0)


INCREMENT = (
    "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def require_one_sequence(client: Client, sampler: FakeSampler) -> None:
    """What chat completions would train of this conversation."""
    trajectory = client.conversation.to_trajectory()
    require_as_sampled(trajectory, sampler)
    assert trajectory.num_tool_calls == 1
    ((context, first, increment, second),) = client.texts()
    assert "<|im_start|>system\nS<|im_end|>" in context
    assert '"description": "Adds."' in context
    assert (first, increment, second) == (f"{CALL}<|im_end|>", INCREMENT, "It is 3<|im_end|>")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_of_openais_responses_calls_a_tool(is_stream: bool) -> None:
    sampler = FakeSampler(QWEN, [CALL, "It is 3"])
    async with served(sampler) as client, openai_of(client) as api:

        async def respond(items: list[Any]) -> Any:
            fields = {"model": "policy", "input": items, "tools": [OWN_TOOL], "instructions": "S"}
            if not is_stream:
                return await api.responses.create(**fields, store=False)
            async with api.responses.stream(**fields) as stream:
                kinds = [event.type async for event in stream]
                assert kinds[0] == "response.created"
                return await stream.get_final_response()

        items: list[Any] = [{"role": "user", "content": "1+2?"}]
        first = await respond(items)
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (first.output_text, call.name) == ("I add.", "add")
        assert json.loads(call.arguments) == {"a": 1, "b": 2}
        assert first.usage.output_tokens == len(sampler.requests[0].sample.token_ids)
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        second = await respond(items)
        assert (second.status, second.output_text) == ("completed", "It is 3")
    require_one_sequence(client, sampler)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_of_anthropic_calls_a_tool(is_stream: bool) -> None:
    sampler = FakeSampler(QWEN, [CALL, "It is 3"])
    async with served(sampler) as client, anthropic_of(client) as api:

        async def respond(chat: list[Any]) -> Any:
            fields = {"model": "policy", "messages": chat, "tools": [ITS_TOOL], "system": "S"}
            if not is_stream:
                return await api.messages.create(**fields, max_tokens=99)
            async with api.messages.stream(**fields, max_tokens=99) as stream:
                return await stream.get_final_message()

        chat: list[Any] = [{"role": "user", "content": "1+2?"}]
        first = await respond(chat)
        text, call = first.content
        assert (text.text, call.name, call.input) == ("I add.", "add", {"a": 1, "b": 2})
        assert first.stop_reason == "tool_use"
        assert first.usage.output_tokens == len(sampler.requests[0].sample.token_ids)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        chat += [{"role": "assistant", "content": first.content}]
        second = await respond([*chat, {"role": "user", "content": [result]}])
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 3")
    require_one_sequence(client, sampler)


async def test_answers_say_how_they_ended() -> None:
    async with (
        served(FakeSampler(STARTER, ["12345", "12345", "1 Obs", "7"])) as client,
        openai_of(client) as openai,
        anthropic_of(client) as anthropic,
    ):
        cut = await openai.responses.create(model="policy", input="Q", max_output_tokens=2)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        chat = [{"role": "user", "content": "Q"}]
        cut = await anthropic.messages.create(model="policy", messages=chat, max_tokens=2)
        assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "12")
        stopped = await anthropic.messages.create(
            model="policy", messages=chat, max_tokens=9, stop_sequences=["Obs"]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Obs")
        include = ["message.output_text.logprobs"]
        told = await openai.responses.create(model="policy", input="Q", include=include)
        assert [e.token for e in told.output[0].content[0].logprobs] == ["7", "<|end|>"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    ({"input": [{"type": "reasoning"}]}, "is of type 'reasoning', must be message"),
    ({"input": 5}, "input is 5, must be a list"),
    ({"tools": [{"type": "web_search"}]}, "no function with a name"),
    ({"reasoning": {"effort": "low"}}, "reasoning is .* alone: leave it out"),
    ({"max_output_tokens": 0}, "max_output_tokens is 0, must be at least 1"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "an object in JSON"),
]
ITS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "is not text"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "no function with a name"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "must be one of auto"),
    ({"stop_sequences": [""]}, "stop_sequences is"),
]


async def test_what_the_server_cannot_do_is_refused_in_the_clients_form() -> None:
    async with (
        served(FakeSampler(STARTER, [])) as client,
        openai_of(client) as openai,
        anthropic_of(client) as anthropic,
    ):
        own, its = (pytest.importorskip(name) for name in ("openai", "anthropic"))
        for fields, message in REFUSED:
            with pytest.raises(own.BadRequestError, match=message):
                await openai.responses.create(**{"model": "policy", "input": "Q", **fields})
        chat = [{"role": "user", "content": "Q"}]
        usual = {"model": "policy", "messages": chat, "max_tokens": 9}
        for fields, message in ITS_REFUSED:
            with pytest.raises(its.BadRequestError, match=message) as caught:
                await anthropic.messages.create(**{**usual, **fields})
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(its.NotFoundError, match="there is no model 'claude'"):
            await anthropic.messages.create(**{**usual, "model": "claude"})


@pytest.mark.usefixtures("ray_cluster")
async def test_clients_show_images() -> None:
    tokenizer = build_seeing_tokenizer()
    template = TurnTemplate(tokenizer, stop_token_ids=[2], images=SETTINGS)
    sampler = FakeSampler(tokenizer, ["a", "b"])
    async with (
        served(sampler, template=template) as client,
        openai_of(client) as openai,
        anthropic_of(client) as anthropic,
    ):
        url = source_of_bytes(to_file(draw(30, 30, 1)))
        shown = {"type": "input_image", "image_url": url, "detail": "auto"}
        content: list[Any] = [{"type": "input_text", "text": "what?"}, shown]
        await openai.responses.create(model="policy", input=[{"role": "user", "content": content}])
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        content = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
        chat = [{"role": "user", "content": content}]
        await anthropic.messages.create(model="policy", messages=chat, max_tokens=9)
    require_as_sampled(client.conversation.to_trajectory(), sampler)
    assert [request.num_images for request in sampler.requests] == [1, 1]
