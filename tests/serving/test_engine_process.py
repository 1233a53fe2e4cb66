"""The actor of one engine, and how its group calls it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest

from hybridrl.errors import EngineError
from hybridrl.serving import engine_process
from hybridrl.serving.engine_process import EngineProcess, RayEngine
from hybridrl.workers.rollout.protocol import RolloutEngine
from tests.config.values import config_of
from tests.workers.sharding.recording import Journal, RecordingEngine


def test_the_call_of_a_life_ends_with_the_engines_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_LOOK_S", 0.001)
    engine = RecordingEngine(0, Journal())

    async def program() -> None:
        process = EngineProcess(config_of("serving=own"), Path())
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
        self.live, self.probe, self.take_metrics = Call(), Call(), Call()


def test_nothing_reaches_an_engine_that_was_cut_or_comes_from_it() -> None:
    actor = Actor()
    engine = RayEngine(actor)
    answered, lost, failed = engine.probe(), engine.probe(), engine.take_metrics()
    actor.probe.calls[0].set_result(1)
    assert answered.result() == 1
    engine.cut()
    actor.probe.calls[1].set_result(2)
    actor.take_metrics.calls[0].set_exception(EngineError("it is gone"))
    later = engine.probe()
    assert len(actor.probe.calls) == 2
    actor.live.calls[0].set_exception(EngineError("it is gone"))
    assert engine.is_alive()  # as far as anybody can know
    assert not any(future.done() for future in (lost, failed, later))
