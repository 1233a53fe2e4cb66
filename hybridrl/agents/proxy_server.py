"""A server for clients of OpenAI and Anthropic before the sampler: on loopback, in the rank's loop.

A request that continues a chat continues its tokens; one with another history begins a sequence of
its own. Every mistake of a client is answered in its own form, and counted; none ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from aiohttp import web

from hybridrl.agents.chat import (
    COMPLETIONS,
    ChatAnswer,
    ChatMessage,
    ChatRequest,
    Fields,
    Interface,
    RefusedRequest,
    read_object,
    read_player,
    read_request,
    to_template,
)
from hybridrl.agents.conversation import Conversation, ConversationEnded, Setting
from hybridrl.agents.messages import MESSAGES
from hybridrl.agents.responses import RESPONSES
from hybridrl.agents.tool_calls import BrokenCall, ToolCall
from hybridrl.agents.tools import ToolResult
from hybridrl.agents.trajectory import OpenSequence
from hybridrl.data.rows import Malformed, Message, RawMessage
from hybridrl.errors import AgentError, shown
from hybridrl.images import Image, Images
from hybridrl.json_text import to_json_text
from hybridrl.sampler import RequestParams

log = logging.getLogger(__name__)

T = TypeVar("T")

_json = partial(web.json_response, dumps=to_json_text)

MODEL = "policy"
"""The name of the model that is trained."""

HOST = "127.0.0.1"
"""Agent programs run on the rank's machine."""

_INTERFACES: Mapping[str, Interface] = {
    "/chat/completions": COMPLETIONS,
    "/responses": RESPONSES,
    "/messages": MESSAGES,
}
_BYTES_PER_TOKEN, _MORE_BYTES = 32, 1 << 16
"""Of a body: text has about 5 bytes a token, and up to 6 times that in escapes of JSON."""
_IMAGES_BYTES = 1 << 26
_CLOSE_TIMEOUT_S = 1.0


class ProxyServer:
    """Answers the requests of many conversations, each with a key of its own."""

    def __init__(self, params: RequestParams) -> None:
        self._params = params
        self._chats: dict[str, Chats] = {}
        self.address = ""
        """The base URL for clients."""
        self.num_refused = 0
        """Requests that were answered with an error."""

    def open(self, chats: Chats) -> str:
        """Begin to answer the requests of a conversation; returns its key."""
        key = secrets.token_urlsafe()
        self._chats[key] = chats
        return key

    def close(self, key: str) -> None:
        """Refuse the key of a conversation from now on."""
        del self._chats[key]

    async def models(self, request: web.Request) -> web.Response:
        """List the only model."""
        self._chats_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridrl"}
        return _json({"object": "list", "data": [model]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Sample the next turn of a chat."""
        chats = self._chats_of(request)
        params, interface = self._params, _interface_of(request)
        chat = read_request(
            await request.read(),
            model=MODEL,
            temperature=params.temperature,
            top_p=params.top_p,
            to_chat=interface.to_chat,
        )
        answer = await chats.ask(chat)
        name = f"{interface.id_prefix}{secrets.token_hex(12)}"
        header = {"id": name, "created": int(time.time()), "model": MODEL}
        if not chat.is_stream:
            return _json(interface.answer(answer, chat, header))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in interface.events(answer, chat, header):
            await response.write(event.encode())
        return response

    async def reward(self, request: web.Request) -> web.Response:
        """Reward the last sampled turn, of a player if one is named, with a program's number."""
        chats, fields = self._chats_of(request), read_object(await request.read())
        player = read_player(fields["model"], MODEL) if "model" in fields else None
        chats.reward(fields.get("reward"), player)
        return _json({})

    @web.middleware
    async def refuse(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer errors in the form of the interface."""
        try:
            return await handler(request)
        except RefusedRequest as error:
            refusal = error
        except web.HTTPException as error:  # no such route, or a body that is too long
            message = f"{request.method} {request.path}: {error.reason}. {error.text}"
            refusal = RefusedRequest(message, status=error.status)
        except ConnectionError:  # the client has gone
            raise
        except Exception as error:
            log.exception("a request of an agent program failed")
            refusal = RefusedRequest(f"{type(error).__name__}: {error}", status=500)
        if not self.num_refused:
            log.warning("refused a request of an agent program: %s", refusal)
        self.num_refused += 1
        return _json(_interface_of(request).refusal(refusal), status=refusal.status)

    def _chats_of(self, request: web.Request) -> Chats:
        headers = request.headers
        _, _, key = headers.get("x-api-key", headers.get("Authorization", "")).rpartition(" ")
        chats = self._chats.get(request.match_info.get("key", key))
        if chats is None:
            rule = "the key is wrong, or its conversation has ended"
            message = f"{rule}: use OPENAI_API_KEY, or ANTHROPIC_API_KEY"
            raise RefusedRequest(message, status=401, code="invalid_api_key")
        return chats


def _interface_of(request: web.Request) -> Interface:
    _, _, path = request.path.rpartition("/v1")
    return _INTERFACES.get(path, COMPLETIONS)


@asynccontextmanager
async def serve(setting: Setting) -> AsyncIterator[ProxyServer]:
    """Listen on a free port of the loopback address, in the running event loop.

    The sampler's longest context limits bodies: tokenizing one holds up all other conversations.
    """
    server = ProxyServer(setting.params)
    max_bytes = _BYTES_PER_TOKEN * setting.sampler.max_context_tokens + _MORE_BYTES
    max_bytes += _IMAGES_BYTES * (setting.template.images is not None)
    app = web.Application(client_max_size=max_bytes, middlewares=[server.refuse])
    for prefix in ("/v1", "/{key}/v1"):
        app.router.add_get(f"{prefix}/models", server.models)
        app.router.add_post(f"{prefix}/reward", server.reward)
        for path in _INTERFACES:
            app.router.add_post(prefix + path, server.complete)
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_TIMEOUT_S
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        _, port = runner.addresses[0]
        server.address = f"http://{HOST}:{port}/v1"
        yield server
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """A chat up to an answer, and the tokens that stand for it."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Fields, ...]
    sequence: OpenSequence
    num_tokens: int
    """Of the sequence, up to the end of the answer."""

    is_cut: bool
    """Whether the answer lacks its stop token."""

    @property
    def is_last(self) -> bool:
        """Return whether nothing follows it in its sequence."""
        return len(self.sequence.token_ids) == self.num_tokens


class Chats:
    """The chats of one agent program: which tokens stand for which messages."""

    def __init__(self, conversation: Conversation, setting: Setting) -> None:
        self._conversation = conversation
        self._setting = setting
        self._template = setting.template
        self.answered: list[AnsweredChat] = []
        self._images: dict[str, Image] = {}
        """By URL."""
        self._num_calls = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has the engine's error, if there was one."""
        self.ended: ConversationEnded | None = None
        """The limit that refused a request, if one did."""

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Sample the answer to a request; any number of requests at a time.

        Raises:
            RefusedRequest: a limit is reached, or the chat template has no form for the messages.
            EngineError: the engine failed.
        """
        try:
            await self._look_at(request.messages)
            sequence = self._continued(request) or self._begun(request)
            num_prompt_tokens = len(sequence.token_ids)
            sample = await self._conversation.sample_turn(
                sequence,
                stops=request.stops,
                max_new_tokens=request.max_tokens,
                player=request.player,
            )
        except ConversationEnded as error:
            self.ended = error
            raise RefusedRequest(str(error), code="conversation_ended") from error
        except (AgentError, Malformed) as error:
            raise RefusedRequest(str(error), param="messages") from error
        except Exception as error:
            if error is self._conversation.sampler_error and not self.failed.done():
                self.failed.set_exception(error)
            raise
        text: str = self._setting.tokenizer.decode(
            sample.token_ids if sample.is_truncated else sample.token_ids[:-1]
        )
        end = min((text.find(stop) for stop in request.stops if stop in text), default=None)
        is_limited = sample.is_truncated and end is None
        if is_limited and len(sample.token_ids) != request.max_tokens:
            self._conversation.end("tokens")
        message = self._message_of(text[:end], request.tools)
        self.answered.append(
            AnsweredChat(
                messages=(*request.messages, message),
                tools=request.tools,
                sequence=sequence,
                num_tokens=len(sequence.token_ids),
                is_cut=sample.is_truncated,
            )
        )
        return ChatAnswer(
            message=message,
            finish_reason="tool_calls" if message.calls else "length" if is_limited else "stop",
            stop=next((s for s in request.stops if text[end:].startswith(s)), None),
            tokens=self._setting.tokenizer.batch_decode(sample.token_ids[:, None]),
            logprobs=sample.logprobs.tolist(),
            num_prompt_tokens=num_prompt_tokens,
        )

    def reward(self, value: Any, player: int | None) -> None:  # noqa: ANN401 - of a program
        """Reward the last sampled turn; RefusedRequest: no finite number, or no turn yet."""
        try:
            self._conversation.reward(float(value), player)
        except (OverflowError, TypeError, ValueError) as error:
            rule = f"the reward is {shown(value)}: {error}"
            raise RefusedRequest(rule, param="reward") from error

    async def _look_at(self, messages: Sequence[ChatMessage]) -> None:
        """Read images that no earlier request had."""
        for url in (url for message in messages for url in message.images):
            if url not in self._images:
                content: list[object] = [{"type": "image", "image": url}]
                (shown,) = await self._conversation.look_at([RawMessage("user", content)])
                (self._images[url],) = shown.images

    def _images_of(self, *messages: ChatMessage) -> Images:
        return tuple(self._images[url] for message in messages for url in message.images)

    def _continued(self, request: ChatRequest) -> OpenSequence | None:
        """Append the new messages of a chat that is known so far."""
        known = [chat for chat in self.answered if _new_messages(chat, request)]
        if not known:
            return None
        chat = max(known, key=lambda chat: (len(chat.messages), chat.is_last))
        new = self._template.harmless(
            [
                Message(m.role, m.content, self._images_of(m), m.name, m.call_id)
                for m in _new_messages(chat, request)
            ]
        )
        if self._setting.history == "branch":
            rewritten = self._in_either_form(
                chat.messages,
                lambda messages: self._template.rewritten(messages, new, tools=chat.tools),
            )
            if rewritten is not None:
                return None
        increment = torch.tensor(self._template.increment(new, is_cut=chat.is_cut))
        if not chat.is_last:  # the program has gone on from here before
            context = chat.sequence.token_ids[: chat.num_tokens]
            images = self._images_of(*request.messages)
            return self._conversation.begin(torch.cat([context, increment]), images)
        self._conversation.append_tokens(chat.sequence, increment, new)
        return chat.sequence

    def _begun(self, request: ChatRequest) -> OpenSequence:
        token_ids = self._in_either_form(
            request.messages, lambda messages: self._template.beginning(messages, request.tools)
        )
        images = self._images_of(*request.messages)
        return self._conversation.begin(torch.tensor(token_ids), images)

    def _in_either_form(
        self, messages: Sequence[ChatMessage], render: Callable[[list[Fields]], T]
    ) -> T:
        """Render messages; some templates take the arguments of calls as JSON alone."""

        def in_form(*, has_json_arguments: bool) -> list[Fields]:
            fields = (to_template(m, has_json_arguments=has_json_arguments) for m in messages)
            return [
                {**f, "images": self._images_of(m)} for f, m in zip(fields, messages, strict=True)
            ]

        try:
            return render(in_form(has_json_arguments=False))
        except AgentError:
            return render(in_form(has_json_arguments=True))

    def _message_of(self, text: str, tools: Sequence[Fields]) -> ChatMessage:
        """Read the calls in the last turn. A turn with a call that cannot be read is text."""
        calls = self._conversation.tool_format.read(text, tools) if tools else ()
        for call in calls:
            is_broken = isinstance(call, BrokenCall)
            self._conversation.note_call(call, ToolResult("", is_error=is_broken, seconds=0.0))
        read = tuple(call for call in calls if isinstance(call, ToolCall) and _has_json_form(call))
        if not read or len(read) < len(calls):
            return ChatMessage("assistant", text.strip())
        before = self._conversation.tool_format.text_before_calls(text)
        numbered = [replace(c, id=c.id or f"call_{n}") for n, c in enumerate(read, self._num_calls)]
        self._num_calls += len(read)
        return ChatMessage("assistant", before.strip(), tuple(numbered))


def _new_messages(chat: AnsweredChat, request: ChatRequest) -> tuple[ChatMessage, ...]:
    """Return the messages that a request has behind a chat; none if it is another one."""
    num_known = len(chat.messages)
    new = request.messages[num_known:]
    is_known = request.tools == chat.tools and request.messages[:num_known] == chat.messages
    return new if is_known and all(m.role in ("tool", "user") for m in new) else ()


def _has_json_form(call: ToolCall) -> bool:
    try:
        to_json_text(call.arguments)
    except (TypeError, ValueError):
        return False
    return True
