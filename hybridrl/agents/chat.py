"""Requests and answers of OpenAI's chat completions: what is read, refused and written.

Requests of other interfaces are brought into this form first: see ``Interface``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridrl.agents.tool_calls import ToolCall
from hybridrl.batch import MAX_PLAYERS
from hybridrl.data.rows import IMAGE_MARK
from hybridrl.errors import shown
from hybridrl.json_text import to_json_text

Fields = Mapping[str, Any]
"""A JSON object."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool"}
_READ = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "logprobs"}
_READ |= {"temperature", "top_p"}
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_STOPS = ("stop", "stop_sequences")
_READ |= {*_LIMITS, *_STOPS}
# They change neither the sampled tokens nor the form of the answer.
_IGNORED = {"user", "metadata", "seed", "store", "service_tier", "safety_identifier"}
_IGNORED |= {"prompt_cache_key", "parallel_tool_calls"}
# Accepted with the value that means that they are not used.
_OFF: Mapping[str, object] = {
    "n": 1,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "text": {"format": {"type": "text"}},
    "reasoning": {},
    "thinking": {"type": "disabled"},
    "truncation": "disabled",
    "background": False,
}
_TOOL_CHOICES = ("auto", "required", "none")


class RefusedRequest(Exception):
    """A request is answered with an error."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        """Name the field that is wrong, and a code for programs, in OpenAI's words."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message, apart from fields that the model does not see; equal ones are the same turn."""

    role: str
    content: str
    """Of an assistant without spaces around it, which clients drop; with a mark for each image."""

    calls: tuple[ToolCall, ...] = ()
    images: tuple[str, ...] = ()
    """``data:`` URLs."""

    call_id: str = field(default="", compare=False)
    name: str = field(default="", compare=False)
    """Of the call whose result it is, and of its tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for the assistant's next turn."""

    messages: tuple[ChatMessage, ...]
    """At least one."""

    player: int
    """Number of who speaks, of the players of a game."""

    tools: tuple[Fields, ...]
    """Schemas, as chat templates take them."""

    max_tokens: int | None

    stops: tuple[str, ...]
    """Strings before which the answer ends; the tokens of the first stay in the conversation."""

    is_stream: bool
    has_usage: bool
    """Whether a stream ends with the numbers of tokens."""

    has_logprobs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """The assistant's turn."""

    message: ChatMessage
    """Its calls have ids."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    stop: str | None
    """The stop string that ended it, which is not in the message."""

    tokens: Sequence[str]
    logprobs: Sequence[float]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Interface:
    """A provider's form of requests and answers; events are those of a stream."""

    id_prefix: str
    to_chat: Callable[[Fields], Fields]
    """Renames the fields of a request to those of chat completions; keeps what it does not know."""

    answer: Callable[[ChatAnswer, ChatRequest, Fields], Fields]
    events: Callable[[ChatAnswer, ChatRequest, Fields], Iterator[str]]
    """Both get a header: id, time and model."""

    refusal: Callable[[RefusedRequest], Fields]


def read_request(
    data: bytes,
    *,
    model: str,
    temperature: float,
    top_p: float,
    to_chat: Callable[[Fields], Fields] = dict,
) -> ChatRequest:
    """Read the JSON body of a request; RefusedRequest names the field that is wrong.

    A request may name no other model, temperature and top-p than these, and a player of the model
    (``read_player``). For ``to_chat`` see ``Interface``.
    """
    fields: Fields = {name: v for name, v in read_object(data).items() if v is not None}
    player = read_player(fields.get("model"), model)
    fields = to_chat(fields)
    _require_supported(fields, temperature=temperature, top_p=top_p)
    tools = tuple(objects_in(fields, "tools"))
    for tool in tools:
        function = tool.get("function")
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not is_named:
            rule = f"the tool {shown(tool)} is no function with a name"
            raise RefusedRequest(rule, param="tools")
    messages = tuple(_named(map(_read_message, objects_in(fields, "messages"))))
    if not messages:
        raise RefusedRequest("there are no messages", param="messages")
    options = fields.get("stream_options", {})
    return ChatRequest(
        messages=messages,
        player=player,
        tools=() if fields.get("tool_choice") == "none" else tools,
        max_tokens=_read_limit(fields),
        stops=_read_stops(fields),
        is_stream=fields.get("stream", False) is True,
        has_usage=isinstance(options, dict) and options.get("include_usage") is True,
        has_logprobs=fields.get("logprobs", False) is True,
    )


def read_player(name: object, model: str) -> int:
    """Return the player that a model's name says, as in ``policy:1``; ``policy`` alone is 0."""
    match = re.fullmatch(rf"{model}(?::(\d{{1,3}}))?", str(name), re.ASCII)
    player = MAX_PLAYERS if match is None else int(match[1] or 0)
    if player >= MAX_PLAYERS:
        rule = f"the only one is {model!r}, with a player as {model}:1 (to {MAX_PLAYERS - 1})"
        message = f"there is no model {shown(name)}; {rule}"
        raise RefusedRequest(message, status=404, param="model", code="model_not_found")
    return player


def read_object(data: bytes) -> Fields:
    """Read the JSON body of a request; RefusedRequest if it is no object."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RefusedRequest(f"the body is {shown(fields)}, must be an object")
    return fields


def _require_supported(fields: Fields, *, temperature: float, top_p: float) -> None:
    off = {**_OFF, "temperature": temperature, "top_p": top_p}
    for name, value in fields.items():
        if name not in _READ | _IGNORED | off.keys():
            raise RefusedRequest(
                f"{name} is not supported", param=name, code="unsupported_parameter"
            )
        if name in off and value not in (off[name], []):
            rule = f"{name} is {shown(value)}, and can be {off[name]} alone: leave it out"
            raise RefusedRequest(rule, param=name, code="unsupported_value")
    choice = fields.get("tool_choice", "auto")
    if choice not in _TOOL_CHOICES:
        rule = f"tool_choice is {shown(choice)}, must be one of {', '.join(_TOOL_CHOICES)}"
        raise RefusedRequest(rule, param="tool_choice", code="unsupported_value")


def _read_limit(fields: Fields) -> int | None:
    for name in _LIMITS:
        if (limit := fields.get(name)) is not None:
            if not isinstance(limit, int) or limit < 1:
                raise RefusedRequest(f"{name} is {shown(limit)}, must be at least 1", param=name)
            return limit
    return None


def _read_stops(fields: Fields) -> tuple[str, ...]:
    name = next((name for name in _STOPS if name in fields), "")
    value = fields.get(name, [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        rule = "must be a string or a list of strings, none of them empty"
        raise RefusedRequest(f"{name} is {shown(value)}, {rule}", param=name)
    return tuple(stops)


def objects_in(fields: Fields, name: str) -> list[Fields]:
    """Return a field that is a list of objects, by default empty; RefusedRequest if it is not."""
    values = fields.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise RefusedRequest(f"{name} is {shown(values)}, must be a list of objects", param=name)
    return values


def _read_message(message: Fields) -> ChatMessage:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        rule = f"a message is of role {shown(role)}, must be one of {', '.join(_ROLES)}"
        raise RefusedRequest(rule, param="messages")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    images = tuple(_url_of(part) for part in parts if _is_image(part))
    texts = [IMAGE_MARK if _is_image(part) else _text_of(part, images) for part in parts]
    text = "".join(texts).encode(errors="replace").decode()
    if role != "assistant":
        call_id = message.get("tool_call_id")
        return ChatMessage(_ROLES[role], text, images=images, call_id=str(call_id or ""))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RefusedRequest(f"{shown(calls)} is not a list of calls", param="messages")
    return ChatMessage(role, text.strip(), tuple(map(_read_call, calls)), images)


def _named(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Give results the names of the tools that were called."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        yield replace(message, name=names.get(message.call_id, "")) if message.call_id else message


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url"


def _url_of(part: dict[str, Any]) -> str:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or not url.startswith("data:"):
        rule = f"the image {shown(part)} is no data: URL; send its bytes in one"
        raise RefusedRequest(rule, param="messages")
    return sys.intern(url)  # later requests repeat it


def _text_of(part: object, images: Sequence[str]) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RefusedRequest(f"the content {shown(part)} is not text", param="messages")
    return text.replace(IMAGE_MARK, "\ufffd") if images else text


def _read_call(call: object) -> ToolCall:
    fields: Fields = call if isinstance(call, dict) else {}
    function = fields["function"] if isinstance(fields.get("function"), dict) else {}
    name, text = function.get("name"), function.get("arguments")
    try:
        arguments = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(name, str) and isinstance(arguments, dict):
        return ToolCall(name, arguments, str(fields.get("id") or ""))
    rule = f"the call {shown(call)} is no function with a name and an object in JSON as arguments"
    raise RefusedRequest(rule, param="messages")


def to_template(message: ChatMessage, *, has_json_arguments: bool) -> dict[str, Any]:
    """Return a message as chat templates take it, with arguments as JSON or as a mapping."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        fields["tool_calls"] = calls_of(message, has_json_arguments=has_json_arguments)
    named = {"name": message.name, "tool_call_id": message.call_id}
    return fields | {key: text for key, text in named.items() if text}


def calls_of(message: ChatMessage, *, has_json_arguments: bool) -> list[dict[str, Any]]:
    """Return the calls of a message as chat completions have them."""
    calls = []
    for number, call in enumerate(message.calls):
        arguments = to_json_text(call.arguments) if has_json_arguments else dict(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        name = call.id or f"call_{number}"
        calls.append({"id": name, "type": "function", "function": function})
    return calls


def refusal(error: RefusedRequest) -> Fields:
    """Return the body of an error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def _completion(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Fields:
    message = {"role": "assistant", "refusal": None, **_content_of(answer)}
    choice = {"index": 0, "message": message, **_end_of(answer, request)}
    usage = _usage_of(answer)
    return {**header, "object": "chat.completion", "choices": [choice], "usage": usage}


def _events(answer: ChatAnswer, request: ChatRequest, header: Fields) -> Iterator[str]:
    """Yield all of the turn at once, because it is sampled."""
    content = _content_of(answer)
    for number, call in enumerate(content.get("tool_calls", [])):
        call["index"] = number
    for delta, end in (
        ({"role": "assistant", **content}, {"finish_reason": None}),
        ({}, _end_of(answer, request)),
    ):
        choice = {"index": 0, "delta": delta, **end}
        yield event({**header, "object": "chat.completion.chunk", "choices": [choice]})
    if request.has_usage:
        usage = {"choices": [], "usage": _usage_of(answer)}
        yield event({**header, "object": "chat.completion.chunk", **usage})
    yield "data: [DONE]\n\n"


def event(fields: Fields) -> str:
    """Return an event of a stream, named by its type if it has one."""
    name = f"event: {fields['type']}\n" if "type" in fields else ""
    return f"{name}data: {to_json_text(fields)}\n\n"


def _content_of(answer: ChatAnswer) -> dict[str, Any]:
    message = answer.message
    if not message.calls:
        return {"content": message.content}
    calls = calls_of(message, has_json_arguments=True)
    return {"content": message.content or None, "tool_calls": calls}


def _end_of(answer: ChatAnswer, request: ChatRequest) -> dict[str, Any]:
    logprobs = {"content": logprobs_of(answer), "refusal": None} if request.has_logprobs else None
    return {"finish_reason": answer.finish_reason, "logprobs": logprobs}


def logprobs_of(answer: ChatAnswer) -> list[Fields]:
    """Return the log-prob of each sampled token, its last one among them."""
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)
    ]


def _usage_of(answer: ChatAnswer) -> dict[str, int]:
    num_sampled = len(answer.tokens)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": answer.num_prompt_tokens + num_sampled,
    }


COMPLETIONS = Interface("chatcmpl-", dict, _completion, _events, refusal)
"""OpenAI's chat completions."""
