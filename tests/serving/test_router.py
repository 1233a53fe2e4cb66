"""The real router before servers that echo."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hybridrl.diagnostics.processes import members_of
from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.serving.router import NO_SERVER, RouterProcess
from tests.serving.echo import echo_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    pytest.importorskip("sglang_router")
    router = RouterProcess(host="127.0.0.1", timeout_s=120.0)
    yield router
    router.end()


def ask(
    router: RouterProcess, key: str, path: str = "/generate", *, index: int = 0
) -> httpx.Response:
    headers = {"X-SMG-Target-Worker": str(index)}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.post(router.url + path, json={"input_ids": [1, 2]}, headers=headers, timeout=30)


def url_of(answer: httpx.Response) -> str:
    return f"http://127.0.0.1:{answer.json()['meta_info']['port']}"


def test_each_request_goes_to_the_server_that_it_names(router: RouterProcess) -> None:
    with echo_server() as (one, _), echo_server() as (other, _), echo_server() as (third, _):
        assert router.show([one]) == [one]
        order = router.show([one, other, third])
        assert sorted(order) == sorted([one, other, third])
        assert router.show([one, other, third]) == order
        assert [url_of(ask(router, router.key, index=i % 3)) for i in range(6)] == order * 2
        order = router.show([other, third])
        assert [url_of(ask(router, router.key, index=i % 2)) for i in range(4)] == order * 2
        assert ask(router, router.key, index=2).status_code == 503
        assert router.show([]) == []
    assert router.workers() == {}
    assert NO_SERVER in ask(router, router.key).text


def test_nobody_is_served_without_the_key(router: RouterProcess) -> None:
    with echo_server() as (url, _):
        router.show([url])
        assert ask(router, "").status_code == ask(router, "wrong").status_code == 401
        assert ask(router, "wrong", "/workers").status_code == 401
        echo = ask(router, router.key).json()["meta_info"]["echo"]
        assert echo["key"] == f"Bearer {router.key}"  # which the server is to check
        router.show([])
    line = Path(f"/proc/{router.process.pid}/cmdline").read_text(encoding="utf-8")
    assert router.key not in line
    assert httpx.get(router.metrics_url).text.startswith("# ")


def test_a_request_to_a_dead_server_is_not_repeated_elsewhere(router: RouterProcess) -> None:
    with echo_server() as (one, server), echo_server() as (other, _):
        order = router.show([one, other])
        server.end()
        assert ask(router, router.key, index=order.index(one)).status_code == 500
        assert url_of(ask(router, router.key, index=order.index(other))) == other
        assert router.show([other]) == [other]
        router.show([])


@pytest.mark.shows("4.22")
def test_a_router_that_died_is_reported_and_leaves_nothing() -> None:
    pytest.importorskip("sglang_router")
    router = RouterProcess(host="127.0.0.1", timeout_s=120.0)
    router.require_alive("sample")
    os.killpg(router.process.pid, signal.SIGKILL)
    wait_until(lambda: not members_of(router.process.pid))
    with pytest.raises(ServerDiedError, match=r"sample: the router .* was killed by SIGKILL"):
        router.require_alive("sample")
    with pytest.raises(ServerDiedError, match="/workers: the router"):
        router.workers()
    router.end()
    router.end()


@pytest.mark.shows("4.22")
def test_a_router_that_does_not_start_shows_the_end_of_its_log() -> None:
    pytest.importorskip("sglang_router")
    with pytest.raises(EngineError, match=r"(?s)it did not start: the router .*policy_"):
        RouterProcess(host="127.0.0.1", timeout_s=120.0, arguments={"policy_": "random"})


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    with pytest.raises(EngineError, match=r"pip install 'hybridrl\[sglang\]'"):
        RouterProcess(host="127.0.0.1", timeout_s=1.0)
