"""The actor of one engine, and how its group calls it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest

from hybridrl.errors import EngineError, ResourceError
from hybridrl.serving import engine_process
from hybridrl.serving.engine_process import ProcessHandle, ReservedNode, RolloutProcess
from hybridrl.workers.rollout.protocol import RolloutEngine
from tests.config.values import config_of
from tests.workers.sharding.recording import Journal, RecordingEngine


def test_the_call_of_a_life_ends_with_the_engines_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_LOOK_S", 0.001)
    engine = RecordingEngine(0, Journal())

    async def program() -> None:
        process = RolloutProcess(config_of("serving=own"), Path())
        life = asyncio.ensure_future(process.live())
        for has_engine in (False, True):
            process._engine = cast(RolloutEngine, engine) if has_engine else None
            await asyncio.wait((life,), timeout=0.05)
            assert not life.done()
        engine.is_alive = False
        await life

    asyncio.run(program())


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
def test_an_engine_whose_node_is_lost_for_good_names_it() -> None:
    actor, lost = Actor(), Reservation(has_node=False)
    kept = Reservation(has_node=True)
    nodes = [ReservedNode(kept, "10.0.0.1", 4.5), ReservedNode(lost, "10.0.0.2", 4.5)]
    built = ProcessHandle(actor, nodes=nodes).build()
    with pytest.raises(ResourceError, match=r"node 10\.0\.0\.2 is lost.*start_timeout_s=4\.5 s"):
        built.result(60)
    assert lost.waited_s == [5]  # Ray counts full seconds


def test_an_engine_on_a_node_is_built_when_its_process_says_so() -> None:
    actor, kept = Actor(), Reservation(has_node=True)
    built = ProcessHandle(actor, nodes=[ReservedNode(kept, "10.0.0.1", 5.0)]).build()
    assert not built.done()
    actor.build.calls[-1].set_result(None)
    assert built.result(60) is None
