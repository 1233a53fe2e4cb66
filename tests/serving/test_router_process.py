"""The real router before servers that echo."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.processes.guard import members_of
from hybridrl.serving.router_process import RouterProcess
from tests.serving.echo import echo_server
from tests.waiting import wait_until

KEY = "a-key"


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    pytest.importorskip("sglang_router")
    router = RouterProcess(key=KEY, timeout_s=120.0)
    yield router
    router.end()


def ask(router: RouterProcess, key: str, path: str = "/generate") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(router.url + path, json={"input_ids": [1, 2]}, headers=headers, timeout=30)


def url_of(answer: httpx.Response) -> str:
    return f"http://127.0.0.1:{answer.json()['meta_info']['port']}"


def test_requests_go_to_the_servers_that_are_shown_and_to_no_other(router: RouterProcess) -> None:
    with echo_server() as (one, _), echo_server() as (other, _):
        router.show([one])
        assert {url_of(ask(router, KEY)) for _ in range(4)} == {one}
        router.show([one, other])
        router.show([other])
        assert {url_of(ask(router, KEY)) for _ in range(4)} == {other}
        router.show([])
    assert router.workers() == {}
    assert ask(router, KEY).status_code == 503


def test_nobody_is_served_without_the_key(router: RouterProcess) -> None:
    with echo_server() as (url, _):
        router.show([url])
        assert ask(router, "").status_code == ask(router, "wrong").status_code == 401
        assert ask(router, "wrong", "/workers").status_code == 401
        echo = ask(router, KEY).json()["meta_info"]["echo"]
        assert echo["key"] == f"Bearer {KEY}"  # which the server is to check
        router.show([])
    line = Path(f"/proc/{router.process.pid}/cmdline").read_text(encoding="utf-8")
    assert KEY not in line


def test_a_request_to_a_dead_server_is_not_repeated_elsewhere(router: RouterProcess) -> None:
    with echo_server() as (one, server), echo_server() as (other, _):
        router.show([one])
        server.end()
        assert ask(router, KEY).status_code == 500
        router.show([other])
        assert url_of(ask(router, KEY)) == other
        router.show([])


@pytest.mark.shows("4.22")
def test_a_router_that_died_is_reported_and_leaves_nothing() -> None:
    pytest.importorskip("sglang_router")
    router = RouterProcess(key=KEY, timeout_s=120.0)
    router.process.require_alive("sample")
    os.killpg(router.process.pid, signal.SIGKILL)
    wait_until(lambda: not members_of(router.process.pid))
    with pytest.raises(ServerDiedError, match=r"sample: the router .* was killed by SIGKILL"):
        router.process.require_alive("sample")
    with pytest.raises(ServerDiedError, match="/workers: the router"):
        router.workers()
    router.end()
    router.end()


@pytest.mark.shows("4.22")
def test_a_router_that_does_not_start_shows_the_end_of_its_log() -> None:
    pytest.importorskip("sglang_router")
    with pytest.raises(EngineError, match=r"(?s)it did not start: the router .*policy_"):
        RouterProcess(key=KEY, timeout_s=120.0, arguments={"policy_": "random"})


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    with pytest.raises(EngineError, match=r"pip install 'hybridrl\[sglang\]'"):
        RouterProcess(key=KEY, timeout_s=1.0)
