"""The real router between a program and servers that echo; both may die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import cast

import httpx
import psutil
import pytest

from hybridrl.errors import DriftError, RouterError
from hybridrl.metrics import Metrics, Sum
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving import router_process
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.router import PolicyRouter
from hybridrl.serving.router_process import RouterProcess
from hybridrl.workers.rollout.sglang.process import ChildProcess
from tests.config.values import config_of
from tests.serving.echo import Addressed, echo_server
from tests.serving.pools import Pool

PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)
CONFIG = config_of(
    *("serving=own", "serving.router=sglang", "rollout=sglang", "rollout.num_slots=2"),
    "serving.health_timeout_s=4",
)


@pytest.fixture(scope="module")
def routed() -> Iterator[PolicyRouter]:
    pytest.importorskip("sglang_router")
    routed = PolicyRouter(CONFIG, vocab_size=1000, key="a-key")
    routed.start()
    yield routed
    routed.end()


@contextmanager
def echo_servers(count: int, *, seconds: float = 0.0) -> Iterator[dict[str, ChildProcess]]:
    with ExitStack() as stack:
        yield dict(stack.enter_context(echo_server(seconds=seconds)) for _ in range(count))


Ask = Callable[[EnginePool], Coroutine[None, None, list[Sample]]]


def run(
    routed: PolicyRouter, servers: Mapping[str, ChildProcess], ask: Ask, *, version: int = 0
) -> tuple[list[Sample], dict[int, str], Metrics]:
    engines = [cast(EngineHandle, Addressed(*server)) for server in servers.items()]

    async def program() -> tuple[list[Sample], Pool]:
        pool = Pool(*engines, version=version)
        pool.on_left = routed.leave_out
        async with routed.open(engines, version=version) as pool.ask:
            return await ask(pool), pool

    samples, pool = asyncio.run(program())
    return samples, pool.reasons, pool.take_metrics() | routed.take_metrics()


async def twelve(pool: EnginePool) -> list[Sample]:
    """Six groups of two responses, each with a seed of its own."""
    groups = await asyncio.gather(
        *(pool.sample_group([1, 2, key], PARAMS, keys=[key, 100 + key]) for key in range(6))
    )
    return [sample for group in groups for sample in group]


SEEDS = [seed for key in range(6) for seed in (key, 100 + key)]


def seeds_of(samples: list[Sample]) -> list[int]:
    assert {len(sample.token_ids) for sample in samples} == {8}
    return [int(sample.token_ids[0]) for sample in samples]


def kill(process: ChildProcess) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def router_of(routed: PolicyRouter) -> ChildProcess:
    return routed.process.process


@pytest.mark.shows("2.11")
def test_servers_get_requests_only_while_they_are_shown(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        samples, _, _ = run(routed, servers, twelve)
        assert seeds_of(samples) == SEEDS
        assert routed.process.workers().keys() == servers.keys()
        routed.hide()
        routed.hide()
        assert routed.process.workers() == {}


@pytest.mark.shows("4.22")
def test_a_router_killed_while_it_takes_servers_is_replaced(
    routed: PolicyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[RouterProcess] = []
    workers = RouterProcess.workers

    def killed_twice(router: RouterProcess) -> dict[str, bool]:
        if len(killed) < 2:
            killed.append(router)
            kill(router.process)
        return workers(router)

    monkeypatch.setattr(RouterProcess, "workers", killed_twice)
    with echo_servers(2) as servers:
        samples, lost, metrics = run(routed, servers, twelve)
    assert seeds_of(samples) == SEEDS
    assert lost == {}
    assert len({id(router) for router in killed}) == 2
    assert metrics["rollout/router_restarts"] == Sum(2)


def test_a_killed_server_costs_no_response_and_doubles_none(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.3) as servers:

        async def ask(pool: EnginePool) -> list[Sample]:
            task = asyncio.ensure_future(twelve(pool))
            await asyncio.sleep(0.5)
            kill(next(iter(servers.values())))
            return await task

        samples, lost, metrics = run(routed, servers, ask)
        assert seeds_of(samples) == SEEDS
        assert not lost  # of the pool: another one may have had the request; the monitor knows
        assert metrics["rollout/unanswered_routed_requests"] == Sum(0)
        # Responses, and a prefill of each group.
        assert metrics["rollout/routed_requests"] == Sum(12 + 6)
        run(routed, servers, twelve)  # the dead one is left out
        routed.hide()


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

        samples, _, _ = run(routed, dict([dying]), ask)
        assert seeds_of(samples) == SEEDS
        routed.hide()


def test_a_server_with_other_weights_is_refused_by_name(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        with pytest.raises(DriftError, match=r"sampled by weights of version 0, .* is at 4"):
            run(routed, servers, twelve, version=4)

        async def ask(pool: EnginePool) -> list[Sample]:
            for url in servers:
                httpx.post(f"{url}/update_weight_version", json={"new_version": "7"})
            return await twelve(pool)

        with pytest.raises(DriftError, match="sampled by weights of version 7"):
            run(routed, servers, ask)
        routed.hide()


@pytest.mark.shows("4.22")
def test_a_router_that_dies_is_started_again_in_the_phase(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.3) as servers:

        async def ask(pool: EnginePool) -> list[Sample]:
            task = asyncio.ensure_future(twelve(pool))
            await asyncio.sleep(0.5)
            kill(router_of(routed))
            return await task

        samples, lost, metrics = run(routed, servers, ask)
        assert seeds_of(samples) == SEEDS
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert not lost
        routed.hide()


@pytest.mark.shows("4.22")
def test_a_new_router_gets_no_server_that_died_with_the_old_one(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        dying, living = servers

        async def ask(pool: EnginePool) -> list[Sample]:
            await twelve(pool)
            kill(servers[dying])
            kill(router_of(routed))
            return await twelve(pool)

        samples, lost, metrics = run(routed, servers, ask)
        assert seeds_of(samples) == SEEDS
        assert not lost
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert routed.process.workers().keys() == {living}
        routed.hide()


@pytest.mark.shows("4.22")
def test_requests_of_a_router_that_died_stay_counted(routed: PolicyRouter) -> None:
    with echo_servers(1) as servers:

        async def ask(pool: EnginePool) -> list[Sample]:
            before = await twelve(pool)
            kill(router_of(routed))
            return before + await pool.sample_group([1, 2, 50], PARAMS, keys=[50])

        _, _, metrics = run(routed, servers, ask)
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert metrics["rollout/unanswered_routed_requests"] == Sum(0)
        # Responses, and a prefill of each group of two.
        assert metrics["rollout/routed_requests"] == Sum(12 + 6 + 1)
        routed.hide()


def stop(process: ChildProcess) -> None:
    for each in psutil.Process(process.pid).children(recursive=True):
        each.suspend()


@pytest.mark.shows("4.22")
def test_a_router_that_hangs_is_replaced_as_one_that_died(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.3) as servers:

        async def ask(pool: EnginePool) -> list[Sample]:
            stop(router_of(routed))
            return await twelve(pool)

        samples, lost, metrics = run(routed, servers, ask)
        assert seeds_of(samples) == SEEDS
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert not lost
        routed.hide()


@pytest.mark.nightly
@pytest.mark.shows("4.22")
def test_a_router_that_hangs_between_phases_is_replaced(
    routed: PolicyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_process, "_CALL_S", 0.5)
    with echo_servers(2) as servers:
        run(routed, servers, twelve)
        hung = router_of(routed)
        stop(hung)
        routed.hide()  # when nobody watches
        assert hung.exit_status() is not None
        assert seeds_of(run(routed, servers, twelve)[0]) == SEEDS
        routed.hide()


@pytest.mark.shows("4.22")
def test_a_router_that_dies_again_and_again_ends_the_phase(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.3) as servers:

        async def ask(pool: EnginePool) -> list[Sample]:
            routed.most_restarts = 0
            task = asyncio.ensure_future(twelve(pool))
            await asyncio.sleep(0.1)
            kill(router_of(routed))
            return await task

        with pytest.raises(RouterError, match=r"ended 1 times in one rollout phase"):
            run(routed, servers, ask)
