"""The real router between a program and servers that echo; both may die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import cast

import httpx
import psutil
import pytest
import torch

from hybridrl.errors import DriftError, ServerDiedError
from hybridrl.metrics import Metrics, Sum
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving import router as router_module
from hybridrl.serving.engine_handle import SamplingEngine
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.policy_router import PolicyRouter, Routes
from hybridrl.workers.rollout.sglang.process import ServerProcess
from hybridrl.workers.rollout.sglang.sampling import ServerSampler
from tests.config.values import config_of
from tests.serving.echo import echo_server
from tests.tiny_models import make_tiny_model

PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)
CONFIG = config_of(
    *("serving=own", "rollout=sglang", "rollout.num_slots=2", "serving.health_timeout_s=4")
)


class Addressed:
    """An engine of which only the address is asked."""

    def __init__(self, url: str) -> None:
        self.url = url

    def address(self) -> Future[str | None]:
        answer: Future[str | None] = Future()
        answer.set_result(self.url)
        return answer


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyRouter]:
    pytest.importorskip("sglang_router")
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "model")
    routed = PolicyRouter(CONFIG, model, "a-key")
    routed.start()
    yield routed
    routed.end()


@contextmanager
def echo_servers(count: int, *, seconds: float = 0.0) -> Iterator[dict[str, ServerProcess]]:
    with ExitStack() as stack:
        yield dict(stack.enter_context(echo_server(seconds=seconds)) for _ in range(count))


Ask = Callable[[EnginePool], Coroutine[None, None, list[Sample]]]


def run(
    routed: PolicyRouter, urls: Iterable[str], ask: Ask, *, version: int = 0
) -> tuple[list[Sample], dict[int, str], Metrics]:
    engines = {i: cast(SamplingEngine, Addressed(url)) for i, url in enumerate(urls)}

    losses: dict[int, str] = {}

    def note(index: int, _: SamplingEngine, reason: str) -> bool:
        losses[index] = reason
        return False

    async def program() -> tuple[list[Sample], EnginePool]:
        pool = EnginePool(
            engines,
            num_slots=2,
            max_context_tokens=32,
            vocab_size=1000,
            version=version,
        )
        pool.on_lost = note
        async with routed.open(engines.values(), version=version) as pool.ask:
            return await ask(pool), pool

    samples, pool = asyncio.run(program())
    return samples, losses, pool.metrics() | routed.take_metrics()


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


def kill(process: ServerProcess) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def router_of(routed: PolicyRouter) -> ServerProcess:
    return routed.front.process.process


class SlowToOpen:
    """A sampler of one server that opens when a test says so; interrupted, it returns no tokens."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.is_interrupted = False

    async def open(self, _: str) -> ServerSampler:
        await self.may_open.wait()
        return cast(ServerSampler, self)

    def interrupt(self) -> None:
        self.is_interrupted = True

    async def sample_group(
        self, _: Sequence[int], params: RequestParams, *, keys: Sequence[int]
    ) -> list[Sample]:
        num_tokens = 0 if self.is_interrupted else params.max_new_tokens
        tokens = torch.zeros(num_tokens, dtype=torch.int64)
        return [Sample(tokens, torch.zeros(num_tokens), "interrupted", 0) for _ in keys]


def test_a_request_whose_route_opens_is_interrupted_as_well() -> None:
    async def program(*, interrupts: bool) -> list[int]:
        server = SlowToOpen()
        routes = Routes(server.open)
        engine = cast(SamplingEngine, Addressed("http://server"))
        asking = asyncio.ensure_future(routes.ask(engine, [1], PARAMS, [7]))
        await asyncio.sleep(0)
        if interrupts:
            routes.interrupt()
        server.may_open.set()
        return [len(sample.token_ids) for sample in await asking]

    assert asyncio.run(program(interrupts=False)) == [8]
    assert asyncio.run(program(interrupts=True)) == [0]


@pytest.mark.shows("2.11")
def test_servers_get_requests_only_while_they_are_shown(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        samples, _, _ = run(routed, servers, twelve)
        assert seeds_of(samples) == SEEDS
        assert routed.front.process.workers().keys() == servers.keys()
        routed.hide()
        routed.hide()
        assert routed.front.process.workers() == {}


@pytest.mark.shows("4.22")
def test_a_router_killed_while_it_takes_servers_is_replaced(
    routed: PolicyRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[router_module.RouterProcess] = []
    workers = router_module.RouterProcess.workers

    def killed_twice(router: router_module.RouterProcess) -> dict[str, bool]:
        if len(killed) < 2:
            killed.append(router)
            kill(router.process)
        return workers(router)

    monkeypatch.setattr(router_module.RouterProcess, "workers", killed_twice)
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
        assert list(lost) == [0]
        assert metrics["rollout/repeated_requests"] == Sum(2)  # of the one group that it had
        unanswered = metrics["rollout/unanswered_routed_requests"].value
        assert unanswered >= 2
        # Responses, and a prefill of each group.
        assert metrics["rollout/routed_requests"].value - unanswered >= 12 + 6
        run(routed, servers, twelve)  # the dead one is left out
        routed.hide()


def test_a_replacement_gets_requests_in_the_same_phase(routed: PolicyRouter) -> None:
    with echo_servers(2, seconds=0.1) as servers:
        dying, coming = servers

        async def ask(pool: EnginePool) -> list[Sample]:
            pool.on_lost = lambda *_: True
            kill(servers[dying])
            task = asyncio.ensure_future(twelve(pool))
            await asyncio.sleep(0.3)
            pool.join(0, cast(SamplingEngine, Addressed(coming)))
            return await task

        samples, _, _ = run(routed, [dying], ask)
        assert seeds_of(samples) == SEEDS
        routed.hide()


def test_a_server_with_other_weights_is_refused_by_name(routed: PolicyRouter) -> None:
    with echo_servers(2) as servers:
        with pytest.raises(DriftError, match=r"has weights of version 0, and .* version 4"):
            run(routed, servers, twelve, version=4)
        old = next(iter(servers))

        async def ask(pool: EnginePool) -> list[Sample]:
            httpx.post(f"{old}/update_weight_version", json={"new_version": "7"})
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
        assert list(lost) == [0]
        assert metrics["rollout/router_restarts"] == Sum(1)
        assert routed.front.process.workers().keys() == {living}
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


def stop(process: ServerProcess) -> None:
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
    monkeypatch.setattr(router_module, "_CALL_S", 0.5)
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
            routed.front.most_restarts = 0
            task = asyncio.ensure_future(twelve(pool))
            await asyncio.sleep(0.1)
            kill(router_of(routed))
            return await task

        with pytest.raises(ServerDiedError, match="the router ended 1 times in one rollout phase"):
            run(routed, servers, ask)
