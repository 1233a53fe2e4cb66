"""OpenAI's Responses: requests as chat completions, and answers as items.

Each request has all of the input: ``previous_response_id`` is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridrl.agents.chat import (
    ChatAnswer,
    ChatRequest,
    Fields,
    Interface,
    RefusedRequest,
    calls_of,
    event,
    logprobs_of,
    objects_in,
    refusal,
)
from hybridrl.errors import shown

_LOGPROBS = "message.output_text.logprobs"


def _to_chat(fields: Fields) -> Fields:
    own = ("input", "instructions", "include")
    chat = {name: value for name, value in fields.items() if name not in own}
    instructions = fields.get("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    given = fields.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    for item in objects_in({"input": given or []}, "input"):
        _append(item, messages)
    included = fields.get("include", [])
    chat["messages"], chat["tools"] = messages, []
    for tool in objects_in(fields, "tools"):
        function = {name: v for name, v in tool.items() if name != "type" and v is not None}
        chat["tools"].append({"type": tool.get("type"), "function": function})
    chat["logprobs"] = isinstance(included, list) and _LOGPROBS in included
    return chat


def _append(item: Fields, messages: list[dict[str, Any]]) -> None:
    """Append an item of the input; a call belongs to the text of the assistant before it."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _to_content(item.get("content"))})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        call = {"id": item.get("call_id"), "function": item}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        called = {"tool_call_id": item.get("call_id")}
        messages.append({"role": "tool", "content": _to_content(item.get("output")), **called})
    else:
        rule = f"an item of the input is of type {shown(kind)}, must be message or function_call"
        raise RefusedRequest(f"{rule}, or function_call_output", param="input")


def _to_content(content: object) -> object:
    """Return parts as chat completions name them; others as they are, to be refused there."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "image_url"}
        if isinstance(part, dict) and part.get("type") == "input_image"
        else part
        for part in content
    ]


def _answer(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Fields:
    output: list[Fields] = []
    if answer.message.content or not answer.message.calls:
        logprobs = logprobs_of(answer) if request.has_logprobs else []
        text = {"text": answer.message.content, "annotations": [], "logprobs": logprobs}
        part = {"type": "output_text", **text}
        message = {"type": "message", "role": "assistant", "content": [part]}
        output.append({"id": f"msg_{header['id']}", "status": "completed", **message})
    for call in calls_of(answer.message, has_json_arguments=True):
        item = {"type": "function_call", "call_id": call["id"], **call["function"]}
        output.append({"id": f"fc_{call['id']}", "status": "completed", **item})
    num_sampled = len(answer.tokens)
    is_cut = answer.finish_reason == "length"
    return {
        "id": header["id"],
        "object": "response",
        "created_at": header["created"],
        "model": header["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "tools": [{"type": tool["type"], **tool["function"]} for tool in request.tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + num_sampled,
        },
    }


def _events(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Iterator[str]:
    for number, fields in enumerate(_numbered_later(answer, request, header)):
        yield event({**fields, "sequence_number": number})


def _numbered_later(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Iterator[Fields]:
    response = _answer(answer, request, header)
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": {**begun, "incomplete_details": None}}
    for index, item in enumerate(response["output"]):
        where = {"output_index": index, "item_id": item["id"]}
        empty: Fields = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if item["type"] == "message":
            yield from _events_of_text(item["content"][0], {**where, "content_index": 0})
        else:
            name, text = "response.function_call_arguments", item["arguments"]
            yield {"type": f"{name}.delta", **where, "delta": text}
            yield {"type": f"{name}.done", **where, "name": item["name"], "arguments": text}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _events_of_text(part: Fields, where: Fields) -> Iterator[Fields]:
    name, kind = "response.content_part", "response.output_text"
    text, logprobs = part["text"], part["logprobs"]
    yield {"type": f"{name}.added", **where, "part": {**part, "text": "", "logprobs": []}}
    yield {"type": f"{kind}.delta", **where, "delta": text, "logprobs": logprobs}
    yield {"type": f"{kind}.done", **where, "text": text, "logprobs": logprobs}
    yield {"type": f"{name}.done", **where, "part": part}


RESPONSES = Interface("resp_", _to_chat, _answer, _events, refusal)
"""OpenAI's Responses."""
