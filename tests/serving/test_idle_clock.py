"""Seconds in which engines have no request, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import pytest
from torch import Tensor

from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.background import IdleClock
from hybridrl.serving.engine_handle import EngineHandle

ENGINE, PARAMS = cast(EngineHandle, None), cast(RequestParams, None)


class Seconds:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def idle_s(clock: IdleClock) -> float:
    return clock.take_metrics()["time/engines_idle_s"].value


def test_the_start_of_the_engines_is_not_idleness(seconds: Seconds) -> None:
    clock = IdleClock()
    seconds.now_s += 50
    assert idle_s(clock) == 0
    seconds.now_s += 50
    ask = clock.counting(_unasked)
    seconds.now_s += 3
    assert idle_s(clock) == 3
    seconds.now_s += 2
    assert clock.counting(ask) is not ask  # another update: the seconds before it count
    assert idle_s(clock) == 2


async def _unasked(
    engine: EngineHandle,
    token_ids: Sequence[int] | Tensor,
    params: RequestParams,
    keys: Sequence[int],
) -> list[Sample]:
    raise AssertionError("nobody asked")


def test_engines_are_idle_while_no_request_is_open(seconds: Seconds) -> None:
    clock = IdleClock()

    async def sample_for(duration_s: float) -> None:
        async def ask(*args: object) -> list[Sample]:
            seconds.now_s += duration_s
            return []

        await clock.counting(ask)(ENGINE, [1], PARAMS, [0])

    async def cycles() -> None:
        for number in range(3):
            seconds.now_s += 0.5
            await sample_for(4.0)
            seconds.now_s += 0.25
            assert idle_s(clock) == (0.25 if not number else 0.75)

    asyncio.run(cycles())


def test_two_requests_at_a_time_count_their_union(seconds: Seconds) -> None:
    clock = IdleClock()

    async def overlapping() -> None:
        gates = [asyncio.Event(), asyncio.Event()]

        async def ask(
            engine: EngineHandle,
            token_ids: Sequence[int] | Tensor,
            params: RequestParams,
            keys: Sequence[int],
        ) -> list[Sample]:
            await gates[keys[0]].wait()
            return []

        counted = clock.counting(ask)
        tasks = [
            asyncio.ensure_future(counted(ENGINE, [1], PARAMS, [number])) for number in range(2)
        ]
        for gate, task in zip(gates, tasks, strict=True):
            await asyncio.sleep(0)
            seconds.now_s += 1
            gate.set()
            await task
        seconds.now_s += 5
        assert idle_s(clock) == 5

    asyncio.run(overlapping())
