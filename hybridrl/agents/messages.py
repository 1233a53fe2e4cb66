"""Anthropic's messages: requests as chat completions, and answers as blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridrl.agents.chat import (
    ChatAnswer,
    ChatRequest,
    Fields,
    Interface,
    RefusedRequest,
    event,
    objects_in,
)
from hybridrl.json_text import to_json_text

_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _to_chat(fields: Fields) -> Fields:
    chat = {name: value for name, value in fields.items() if name != "system"}
    system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    messages = (part for m in objects_in(fields, "messages") for part in _to_messages(m))
    chat["messages"], chat["tools"] = [*system, *messages], []
    for tool in objects_in(fields, "tools"):
        kind = tool.get("type", "custom")
        function = {name: tool[name] for name in ("name", "description") if name in tool}
        function["parameters"] = tool.get("input_schema", {})
        own = {"type": "function", "function": function}
        chat["tools"].append(own if kind == "custom" else tool)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        chat["tool_choice"] = _CHOICES.get(str(choice.get("type")), choice)
    return chat


def _to_messages(message: Fields) -> Iterator[Fields]:
    """Yield the results of tools in a message, and then what else it has."""
    blocks = message.get("content")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        yield {**message}
        return
    results = [block for block in blocks if block.get("type") == "tool_result"]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    others = [_to_part(b) for b in blocks if b.get("type") not in ("tool_result", "tool_use")]
    for result in results:
        content = result.get("content")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        called = {"tool_call_id": result.get("tool_use_id")}
        yield {"role": "tool", "content": [*map(_to_part, parts)], **called}
    if others or calls or not results:
        said: dict[str, Any] = {"role": message.get("role"), "content": others}
        yield {**said, "tool_calls": [*map(_to_call, calls)]}


def _to_call(block: Fields) -> Fields:
    arguments = to_json_text(block.get("input", {}))
    return {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": arguments}}


def _to_part(block: object) -> object:
    """Return an image as chat completions have it; others as they are, to be refused there."""
    source = block.get("source") if isinstance(block, dict) else None
    if not isinstance(block, dict) or block.get("type") != "image" or not isinstance(source, dict):
        return block
    data = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": data if "data" in source else source.get("url")}


def _answer(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Fields:
    text = answer.message.content
    blocks: list[Fields] = [{"type": "text", "text": text}] if text else []
    for call in answer.message.calls:
        called = {"id": call.id, "name": call.name, "input": dict(call.arguments)}
        blocks.append({"type": "tool_use", **called})
    is_stopped = answer.finish_reason == "stop" and answer.stop is not None
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": header["id"],
        "type": "message",
        "role": "assistant",
        "model": header["model"],
        "content": blocks,
        "stop_reason": "stop_sequence" if is_stopped else reasons[answer.finish_reason],
        "stop_sequence": answer.stop if is_stopped else None,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.tokens)},
    }


def _events(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Iterator[str]:
    message = _answer(answer, request, header)
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**message, "content": [], **dict.fromkeys(ending)}
    yield event({"type": "message_start", "message": begun})
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty: Fields = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            written = to_json_text(block["input"])
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": written}
        begun = {**block, **empty}
        yield event({"type": "content_block_start", "index": index, "content_block": begun})
        yield event({"type": "content_block_delta", "index": index, "delta": delta})
        yield event({"type": "content_block_stop", "index": index})
    yield event({"type": "message_delta", "delta": ending, "usage": message["usage"]})
    yield event({"type": "message_stop"})


def _refusal(error: RefusedRequest) -> Fields:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _KINDS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


MESSAGES = Interface("msg_", _to_chat, _answer, _events, _refusal)
"""Anthropic's messages."""
