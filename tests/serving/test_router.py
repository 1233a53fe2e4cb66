from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest

from hybridrl.errors import DriftError, EngineError, RouterError
from hybridrl.metrics import Metrics, Sum
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving import sglang_router_process
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.sglang_router import PolicyRouter
from hybridrl.serving.sglang_router_process import RouterProcess
from hybridrl.workers.rollout.sglang.process import ChildProcess
from tests.config.values import config_of
from tests.serving.echo import Addressed, echo_server
from tests.serving.engines import Pool

KEY = "a-key"
PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)
CONFIG = config_of(
    *("serving=own", "serving.router=sglang", "rollout=sglang", "rollout.num_slots=2"),
    "serving.health_timeout_s=4",
)
Servers = dict[str, ChildProcess]


@pytest.fixture(scope="module")
def router() -> Iterator[PolicyRouter]:
    pytest.importorskip("sglang_router")
    router = PolicyRouter(CONFIG, vocab_size=1000, key=KEY)
    router.start()
    yield router
    router.end()


@pytest.fixture
def routed(router: PolicyRouter) -> Iterator[PolicyRouter]:
    """The router, which knows no server after the test."""
    yield router
    router.hide()


@contextmanager
def echo_servers(count: int, *, seconds: float = 0.0) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield dict(stack.enter_context(echo_server(seconds=seconds)) for _ in range(count))


Ask = Callable[[EnginePool], Coroutine[None, None, list[Sample]]]


async def twelve(pool: EnginePool) -> list[Sample]:
    """Six groups of two responses, each with a seed of its own."""
    groups = await asyncio.gather(
        *(pool.sample_group([1, 2, key], PARAMS, keys=[key, 100 + key]) for key in range(6))
    )
    return [sample for group in groups for sample in group]


def run(
    routed: PolicyRouter, servers: Servers, ask: Ask = twelve, *, version: int = 0
) -> tuple[dict[int, str], Metrics]:
    """Get twelve responses, each once; return the lost engines."""
    engines = [cast(EngineHandle, Addressed(*server)) for server in servers.items()]

    async def program() -> tuple[list[Sample], Pool]:
        pool = Pool(*engines, version=version)
        pool.on_left = routed.leave_out
        async with routed.open(engines, version=version) as pool.ask:
            return await ask(pool), pool

    samples, pool = asyncio.run(program())
    assert {len(sample.token_ids) for sample in samples} == {8}
    seeds = [int(sample.token_ids[0]) for sample in samples]
    assert seeds == [seed for key in range(6) for seed in (key, 100 + key)]
    return pool.reasons, pool.take_metrics() | routed.take_metrics()


async def twelve_while(harm: Callable[[], None], pool: EnginePool) -> list[Sample]:
    """Twelve responses that take a second; ``harm`` is done in it."""
    task = asyncio.ensure_future(twelve(pool))
    await asyncio.sleep(0.5)
    harm()
    return await task


def kill(process: ChildProcess) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def stop(process: ChildProcess) -> None:
    for each in psutil.Process(process.pid).children(recursive=True):
        each.suspend()


def post(routed: PolicyRouter, key: str = KEY, path: str = "/generate") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = routed.process.url + path
    return httpx.post(url, json={"input_ids": [1, 2]}, headers=headers, timeout=30)


def answerer(routed: PolicyRouter) -> str:
    return f"http://127.0.0.1:{post(routed).json()['meta_info']['port']}"


@pytest.mark.shows("2.11")
def test_servers_get_requests_only_while_they_are_shown(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        run(routed, servers)
        assert routed.process.workers().keys() == servers.keys()
        for url in servers:
            routed.process.show([url])
            assert {answerer(routed) for _ in range(4)} == {url}
        routed.process.show(list(servers))
        for _ in range(2):
            routed.hide()
            assert routed.process.workers() == {}
            assert post(routed).status_code == 503


def test_nobody_is_served_without_the_key(routed: PolicyRouter) -> None:
    with echo_servers(1) as servers:
        routed.process.show(list(servers))
        assert post(routed, "").status_code == post(routed, "wrong").status_code == 401
        assert post(routed, "wrong", "/workers").status_code == 401
        echo = post(routed).json()["meta_info"]["echo"]
        assert echo["key"] == f"Bearer {KEY}"  # which the server is to check
        routed.process.show([])
    line = Path(f"/proc/{routed.process.process.pid}/cmdline").read_text(encoding="utf-8")
    assert KEY not in line


def test_a_request_to_a_dead_server_is_not_repeated_elsewhere(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        one, other = servers
        routed.process.show([one])
        servers[one].end()
        assert post(routed).status_code == 500
        routed.process.show([other])
        assert answerer(routed) == other
        routed.process.show([])


def test_a_killed_server_costs_no_response_and_doubles_none(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.3) as servers:
        dying = next(iter(servers.values()))
        lost, metrics = run(routed, servers, lambda pool: twelve_while(lambda: kill(dying), pool))
        assert not lost  # of the pool: another one may have had the request; the monitor knows
        assert metrics["rollout/unanswered_routed_requests"] == Sum(0)
        # Responses, and a prefill of each group.
        assert metrics["rollout/routed_requests"] == Sum(12 + 6)
        run(routed, servers)  # the dead one is left out


def test_a_replacement_gets_requests_in_the_same_phase(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.1) as servers:
        dying, coming = servers.items()

        async def ask(pool: EnginePool) -> list[Sample]:
            pool.on_lost = lambda *_: True
            task = asyncio.ensure_future(twelve(pool))
            await asyncio.sleep(0.1)
            kill(dying[1])
            pool.drop(0, next(iter(routed._servers)), "its process is gone")
            await asyncio.sleep(0.3)
            pool.join(0, cast(EngineHandle, Addressed(*coming)))
            return await task

        run(routed, dict([dying]), ask)


def test_a_server_with_other_weights_is_refused_by_name(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        with pytest.raises(DriftError, match=r"sampled by weights of version 0, .* is at 4"):
            run(routed, servers, version=4)

        async def ask(pool: EnginePool) -> list[Sample]:
            for url in servers:
                httpx.post(f"{url}/update_weight_version", json={"new_version": "7"})
            return await twelve(pool)

        with pytest.raises(DriftError, match="sampled by weights of version 7"):
            run(routed, servers, ask)


# -- its end -------------------------------------------------------------------------------------


@pytest.mark.shows("4.22")
def test_a_router_killed_while_it_takes_servers_is_replaced(
    routed: PolicyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[RouterProcess] = []
    workers = RouterProcess.workers

    def killed_at_first(router: RouterProcess) -> dict[str, bool]:
        if not killed:
            killed.append(router)
            kill(router.process)
        return workers(router)

    monkeypatch.setattr(RouterProcess, "workers", killed_at_first)
    with echo_servers(2) as servers:
        lost, metrics = run(routed, servers)
        assert lost == {}
        assert killed[0] is not routed.process
        assert metrics["rollout/router_restarts"] == Sum(1)


@pytest.mark.shows("4.22")
def test_a_router_that_hangs_is_started_again_in_the_phase(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.3) as servers:
        victim = routed.process.process
        lost, metrics = run(routed, servers, lambda pool: twelve_while(lambda: stop(victim), pool))
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert metrics["rollout/unanswered_routed_requests"] == Sum(0)
        assert metrics["rollout/routed_requests"] == Sum(12 + 6)  # those of the old one are counted
        assert not lost


@pytest.mark.shows("4.22")
def test_a_new_router_gets_no_server_that_died_with_the_old_one(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        dying, living = servers

        async def ask(pool: EnginePool) -> list[Sample]:
            await twelve(pool)
            kill(servers[dying])
            kill(routed.process.process)
            return await twelve(pool)

        lost, metrics = run(routed, servers, ask)
        assert not lost
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert routed.process.workers().keys() == {living}


@pytest.mark.nightly
@pytest.mark.shows("4.22")
def test_a_router_that_hangs_between_phases_is_replaced(
    routed: PolicyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_router_process, "_CALL_S", 0.5)
    with echo_servers(2) as servers:
        run(routed, servers)
        hung = routed.process.process
        stop(hung)
        routed.hide()  # when nobody watches
        assert hung.exit_status() is not None
        run(routed, servers)


@pytest.mark.shows("4.22")
def test_a_router_that_dies_again_and_again_ends_the_phase(
    routed: PolicyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "most_restarts", 0)
    with echo_servers(2, seconds=0.3) as servers:
        victim = routed.process.process
        with pytest.raises(RouterError, match=r"ended 1 times in one rollout phase"):
            run(routed, servers, lambda pool: twelve_while(lambda: kill(victim), pool))
    routed.start()
    routed.take_metrics()  # which counts anew


@pytest.mark.shows("4.22")
def test_a_router_that_does_not_start_shows_the_end_of_its_log() -> None:
    pytest.importorskip("sglang_router")
    with pytest.raises(EngineError, match=r"(?s)it did not start: the router .*policy_"):
        RouterProcess(key=KEY, timeout_s=120.0, arguments={"policy_": "random"})


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    with pytest.raises(EngineError, match=r"pip install 'hybridrl\[sglang\]'"):
        RouterProcess(key=KEY, timeout_s=1.0)
