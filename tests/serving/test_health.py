from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest

from hybridrl.errors import EngineError, ResourceError
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving import engine_process
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_process import ProcessHandle, ReservedNode, RolloutProcess
from hybridrl.serving.health import HealthMonitor
from hybridrl.serving.sglang_router import PolicyRouter
from hybridrl.workers.rollout.protocol import RolloutEngine
from tests.config.values import config_of
from tests.end_to_end.two_machines import can_be_made
from tests.serving.echo import Addressed, echo_server
from tests.serving.engines import Pool, RecordingHandle
from tests.workers.sharding.recording import Journal, RecordingEngine

TIMEOUT_S = 100.0


class Rig:
    """A monitor that looks when the test says so."""

    def __init__(self, num_engines: int = 1, *, timeout_s: float = TIMEOUT_S) -> None:
        journal = Journal()
        self.engines = [RecordingHandle(index, journal) for index in range(num_engines)]
        self.reports: list[tuple[int, str]] = []
        self.now_s = 0.0
        self.monitor = HealthMonitor(
            lambda: cast("dict[int, EngineHandle]", dict(enumerate(self.engines))),
            lambda index, _, reason: self.reports.append((index, reason)),
            timeout_s=timeout_s,
        )

    def look(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.monitor.look(self.now_s)


@pytest.mark.parametrize("answer", ["the same", "an error", None])
@pytest.mark.shows("4.14")
def test_an_engine_without_progress_is_reported_after_the_time_and_a_busy_one_never(
    answer: str | None,
) -> None:
    rig = Rig(2)
    busy, stuck = rig.engines
    rig.look()
    for number in range(12):
        busy.probes[-1].set_result(number)  # further at each look
        if answer == "an error" and not stuck.probes[-1].done():
            stuck.probes[-1].set_exception(EngineError("no answer"))
        elif answer == "the same" and not stuck.probes[-1].done():
            stuck.probes[-1].set_result(answer)
        last_s = TIMEOUT_S + 10 * (answer == "the same")  # the first answer is progress
        rig.look(after_s=10.0)
        assert bool(rig.reports) == (rig.now_s > last_s)
    assert {index for index, _ in rig.reports} == {1}
    assert "serving.health_timeout_s=100 s" in rig.reports[0][1]
    assert answer or len(stuck.probes) == 1  # it is asked once, and not again and again


def test_a_dead_engine_is_reported_at_the_next_look() -> None:
    rig = Rig(2)
    rig.look()
    rig.engines[1].kill()
    rig.look(after_s=0.1)
    assert rig.reports == [(1, "its process is gone")]


@pytest.mark.shows("2.12", "4.14")
def test_a_pause_waits_for_the_probe_in_flight() -> None:
    rig = Rig()
    rig.look()
    pausing = threading.Thread(target=rig.monitor.stop)
    pausing.start()
    pausing.join(0.2)
    assert pausing.is_alive()
    rig.engines[0].probes[0].set_result(1)
    pausing.join(60.0)
    assert not pausing.is_alive()
    assert len(rig.engines[0].probes) == 1


@pytest.mark.shows("2.12", "4.14")
def test_a_paused_engine_is_not_taken_for_a_dead_one_when_it_goes_on() -> None:
    rig = Rig(timeout_s=0.05)  # so long a pause waits for the probe in flight
    rig.look()
    rig.monitor.stop()
    rig.look(after_s=1.0)
    rig.look(after_s=0.04)
    assert rig.reports == []
    rig.look(after_s=0.02)
    assert len(rig.reports) == 1


async def test_the_call_of_a_life_ends_with_the_engines_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "_LOOK_S", 0.001)
    engine = RecordingEngine(0, Journal())
    process = RolloutProcess(config_of("serving=own"), Path())
    life = asyncio.ensure_future(process.live())
    for has_engine in (False, True):
        process._engine = cast(RolloutEngine, engine) if has_engine else None
        await asyncio.wait((life,), timeout=0.05)
        assert not life.done()
    engine.is_alive = False
    await life


class Call:
    """A call of Ray's that a test answers."""

    def __init__(self) -> None:
        self.calls: list[Future[object]] = []

    def remote(self, *_: object) -> Call:
        self.calls.append(Future())
        return self

    def future(self) -> Future[object]:
        return self.calls[-1]


class Actor:
    """The calls of an actor that these tests need."""

    def __init__(self) -> None:
        self.live, self.build = Call(), Call()
        self.probe, self.address = Call(), Call()


def test_nothing_reaches_an_engine_that_was_cut_or_comes_from_it() -> None:
    actor = Actor()
    engine = ProcessHandle(actor)
    answered, lost, failed = engine.probe(), engine.probe(), engine.address()
    actor.probe.calls[0].set_result(1)
    assert answered.result() == 1
    engine.harm("cut")
    actor.probe.calls[1].set_result(2)
    actor.address.calls[0].set_exception(EngineError("it is gone"))
    later = engine.probe()
    assert len(actor.probe.calls) == 2
    actor.live.calls[0].set_exception(EngineError("it is gone"))
    assert engine.is_alive()  # as far as anybody can know
    assert not any(future.done() for future in (lost, failed, later))


class Reservation:
    """Resources of one node, which a node joins for or not."""

    def __init__(self, *, has_node: bool) -> None:
        self.has_node = has_node
        self.waited_s: list[int] = []

    def wait(self, seconds: int) -> bool:
        self.waited_s.append(seconds)
        return self.has_node


@pytest.mark.shows("4.12")
def test_an_engine_is_built_on_its_nodes_and_names_one_that_is_lost_for_good() -> None:
    actor, lost = Actor(), Reservation(has_node=False)
    kept = Reservation(has_node=True)
    nodes = [ReservedNode(kept, "10.0.0.1", 4.5), ReservedNode(lost, "10.0.0.2", 4.5)]
    built = ProcessHandle(actor, nodes=nodes).build()
    with pytest.raises(ResourceError, match=r"node 10\.0\.0\.2 is lost.*start_timeout_s=4\.5 s"):
        built.result(60)
    assert lost.waited_s == [5]  # Ray counts full seconds
    actor = Actor()
    built = ProcessHandle(actor, nodes=[ReservedNode(kept, "10.0.0.1", 5.0)]).build()
    assert not built.done()
    actor.build.calls[-1].set_result(None)
    assert built.result(60) is None


_NUMBER = os.getpid() % 2**14  # a network of each process, since tests run side by side
HERE, THERE = (f"10.98.{_NUMBER // 64}.{_NUMBER % 64 * 4 + host}" for host in (1, 2))
PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)
CONFIG = config_of(
    *("serving=own", "serving.router=sglang", "rollout=sglang", "rollout.num_slots=2")
)

_THREADS = ThreadPoolExecutor(4)


class Reached(Addressed):
    """An engine that is asked over the network alone, and lives for all that anybody knows."""

    def probe(self) -> Future[object]:
        return _THREADS.submit(self._ask)

    def _ask(self) -> object:
        return httpx.get(f"{self.url}/model_info", timeout=1.0).elapsed, time.monotonic()


@contextmanager
def cable() -> Iterator[str]:
    """A namespace that a pair of devices connects with this one; yields their common name."""
    name = f"cut{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "eth", "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", name)
        ip("link", "set", name, "up")
        ip("-n", name, "addr", "add", f"{THERE}/30", "dev", "eth")
        for device in ("lo", "eth"):
            ip("-n", name, "link", "set", device, "up")
        yield name
    finally:
        ip("netns", "del", name)  # and the devices with it


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.mark.nightly
@pytest.mark.skipif(
    not can_be_made(), reason="needs root, ip and unshare, to make a network namespace"
)
@pytest.mark.shows("4.14")
def test_requests_leave_an_engine_whose_network_is_cut() -> None:
    pytest.importorskip("sglang_router")
    routed = PolicyRouter(CONFIG, vocab_size=1000, key="a-key")
    with (
        cable() as name,
        echo_server(seconds=0.3) as (near, _),
        echo_server(seconds=0.3, host=THERE, within=("ip", "netns", "exec", name)) as (far, _),
    ):
        engines = {index: cast(EngineHandle, Reached(url)) for index, url in enumerate((far, near))}

        async def program() -> list[list[Sample]]:
            pool = Pool(*engines.values())
            pool.on_left = routed.leave_out
            monitor = HealthMonitor(lambda: engines, pool.drop, timeout_s=2.0)
            async with routed.open(engines.values(), version=0) as pool.ask:
                with monitor.watching():
                    asks = [pool.sample_group([1, n], PARAMS, keys=[n]) for n in range(8)]
                    tasks = [asyncio.ensure_future(each) for each in asks]
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    # At its end: at ours the route would go, and a gateway might answer.
                    ip("-n", name, "link", "set", "eth", "down")
                    return await asyncio.gather(*tasks)

        routed.start()
        try:
            samples = asyncio.run(program())
        finally:
            routed.end()
    assert [int(sample.token_ids[0]) for (sample,) in samples] == list(range(8))
