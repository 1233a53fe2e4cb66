from __future__ import annotations

import asyncio
import gc
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.workers.rollout.sglang.client import ConnectionLostError, ControlClient, RefusedError
from tests.workers.rollout.answering import Body, answering


def is_gone(what: str) -> None:
    raise EngineError(f"{what}: the server was killed by SIGKILL")


@contextmanager
def client_of(url: str, *, is_dead: bool = False) -> Iterator[ControlClient]:
    client = ControlClient(
        url, name="the server", require_alive=is_gone if is_dead else lambda _: None
    )
    try:
        yield client
    finally:
        client.close()
        client.close()  # twice is a no-op


async def answer(path: str, body: Body) -> web.StreamResponse:
    if path == "/json":
        return web.json_response({"got": body})
    if path == "/text":
        return web.Response(text="Cache flushed.")
    if path == "/refused":
        return web.json_response({"error": {"message": "no such tensor"}}, status=400)
    if path == "/slow":
        await asyncio.sleep(30)
    return web.Response(status=500, text="it broke")


def test_an_answer_is_json_where_it_is_json_and_a_refusal_has_the_servers_words() -> None:
    with answering(answer) as server, client_of(server.url) as client:
        assert client.call("/json", {"a": [1, 2]}, timeout_s=10.0) == {"got": {"a": [1, 2]}}
        assert client.call("/text", timeout_s=10.0, method="GET") == "Cache flushed."
        with pytest.raises(RefusedError, match="/refused was answered with status 400: no such t"):
            client.call("/refused", {}, timeout_s=10.0)
        with pytest.raises(RefusedError, match="status 500: it broke"):
            client.call("/other", {}, timeout_s=10.0)


def test_a_call_that_is_not_answered_in_time_says_how_long_it_waited() -> None:
    with (
        answering(answer) as server,
        client_of(server.url) as client,
        pytest.raises(DeadlineError, match=r"/slow: the server did not answer within 0\.2 s"),
    ):
        client.call("/slow", {}, timeout_s=0.2)


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_lost_connection_is_told_from_a_dead_server(is_dead: bool) -> None:
    with answering(answer) as server:
        url = server.url
    error, text = (EngineError, "SIGKILL") if is_dead else (ConnectionLostError, "did not answer")
    with client_of(url, is_dead=is_dead) as client, pytest.raises(error, match=text):
        client.call("/json", {}, timeout_s=10.0)


def test_requests_run_at_the_same_time() -> None:
    everybody_is_here = asyncio.Barrier(50)

    async def meet(_: str, __: Body) -> web.StreamResponse:
        await asyncio.wait_for(everybody_is_here.wait(), timeout=30)
        return web.json_response("met")

    with answering(meet) as server, client_of(server.url) as client:

        async def all_meet() -> list[str]:
            requests = [client.request("/meet", {}, timeout_s=60.0) for _ in range(50)]
            return await asyncio.gather(*requests)

        assert client.run(all_meet()) == ["met"] * 50


def test_close_fails_requests_that_still_connect_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = BaseSelectorEventLoop.sock_connect

    async def connect_slowly(*arguments: Any) -> None:
        await asyncio.sleep(0.1)
        await connect(*arguments)

    monkeypatch.setattr(BaseSelectorEventLoop, "sock_connect", connect_slowly)
    with answering(answer) as server, client_of(server.url) as client:
        requests = [client.start(client.request("/slow", {}, timeout_s=60.0)) for _ in range(4)]
        client.run(asyncio.sleep(0.05))
        client.close()
        assert all(isinstance(each.exception(0), ConnectionLostError) for each in requests)
        with pytest.raises(EngineError, match="the server was ended"):
            client.call("/json", {}, timeout_s=1.0)
    gc.collect()  # an unclosed connection is a warning, which fails this test
