"""An OpenAI-compatible server in front of the sampler: on the loopback address, in the rank's loop.

Every mistake of a client is answered in OpenAI's form, and counted; none ends the run.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from hybridrl.agents.chat import (
    ChatAnswer,
    ChatRequest,
    RefusedRequest,
    completion,
    events,
    read_request,
)
from hybridrl.json_text import to_json_text
from hybridrl.sampler import RequestParams

log = logging.getLogger(__name__)

_json = partial(web.json_response, dumps=to_json_text)

MODEL = "policy"
"""The name of the model that is trained."""

HOST = "127.0.0.1"
"""Agent programs run on the rank's machine."""

_BYTES_PER_TOKEN, _MORE_BYTES = 32, 1 << 16
"""Of a body: text has about 5 bytes a token, and up to 6 times that in escapes of JSON."""
_CLOSE_TIMEOUT_S = 1.0

Ask = Callable[[ChatRequest], Awaitable[ChatAnswer]]
"""Samples the answer to a request of one conversation; raises RefusedRequest."""


class ProxyServer:
    """Answers the requests of many conversations, each with a key of its own."""

    def __init__(self, params: RequestParams) -> None:
        """Sample with ``params``; see ``serve``."""
        self._params = params
        self._conversations: dict[str, Ask] = {}
        self.address = ""
        """The base URL for clients."""
        self.num_refused = 0
        """Requests that were answered with an error."""

    def open(self, ask: Ask) -> str:
        """Begin to answer the requests of a conversation; returns its key."""
        key = secrets.token_urlsafe()
        self._conversations[key] = ask
        return key

    def close(self, key: str) -> None:
        """Refuse the key of a conversation from now on."""
        del self._conversations[key]

    async def models(self, request: web.Request) -> web.Response:
        """List the only model."""
        self._conversation_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridrl"}
        return _json({"object": "list", "data": [model]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Sample the next turn of a chat."""
        ask = self._conversation_of(request)
        params = self._params
        chat = read_request(
            await request.read(), model=MODEL, temperature=params.temperature, top_p=params.top_p
        )
        answer = await ask(chat)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        header = {"id": name, "created": int(time.time()), "model": MODEL}
        if not chat.is_stream:
            text = completion(answer, chat, header=header)
            return web.Response(text=text, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events(answer, chat, header=header):
            await response.write(event.encode())
        return response

    @web.middleware
    async def refuse(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Answer errors in OpenAI's form."""
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
        return _json(refusal.body, status=refusal.status)

    def _conversation_of(self, request: web.Request) -> Ask:
        _, _, key = request.headers.get("Authorization", "").rpartition(" ")
        ask = self._conversations.get(request.match_info.get("key", key))
        if ask is None:
            message = "the key is wrong, or its conversation has ended: use OPENAI_API_KEY"
            raise RefusedRequest(message, status=401, code="invalid_api_key")
        return ask


@asynccontextmanager
async def serve(params: RequestParams, *, max_context_tokens: int) -> AsyncIterator[ProxyServer]:
    """Listen on a free port of the loopback address, in the running event loop.

    Args:
        params: temperature and top-p of all requests; a request may not ask for others.
        max_context_tokens: limits bodies: tokenizing one holds up all other conversations.
    """
    server = ProxyServer(params)
    max_bytes = _BYTES_PER_TOKEN * max_context_tokens + _MORE_BYTES
    app = web.Application(client_max_size=max_bytes, middlewares=[server.refuse])
    for prefix in ("/v1", "/{key}/v1"):
        app.router.add_get(f"{prefix}/models", server.models)
        app.router.add_post(f"{prefix}/chat/completions", server.complete)
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
