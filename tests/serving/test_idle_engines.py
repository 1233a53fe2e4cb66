"""Seconds in which engines have no request, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from hybridrl.metrics import Max
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_pool import EnginePool
from tests.serving.pools import Pool, in_loop

PARAMS = RequestParams(max_new_tokens=1, temperature=1.0)
ANSWER = Sample(torch.tensor([1]), torch.zeros(1), "stop", 0)


class Seconds:
    """A clock that stands still until it is moved."""

    now_s = 100.0


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    clock = Seconds()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now_s)
    return clock


def new_pool() -> EnginePool:
    pool = Pool(object(), version=-1)
    pool.suspend(0)
    return pool


def admit(pool: EnginePool) -> None:
    pool.join(0, pool._members[0].handle, version=0)


def idle_s(pool: EnginePool) -> float:
    return pool.take_metrics().get("time/engines_idle_s", Max(0.0)).value


def test_the_start_of_the_engines_is_not_idleness(seconds: Seconds) -> None:
    pool = new_pool()
    seconds.now_s += 50
    assert idle_s(pool) == 0
    seconds.now_s += 50
    admit(pool)
    seconds.now_s += 3
    assert idle_s(pool) == 3
    seconds.now_s += 2
    pool.suspend(0)
    admit(pool)  # another update: the seconds before it count
    assert idle_s(pool) == 2


@in_loop
async def test_engines_are_idle_while_no_request_is_open(seconds: Seconds) -> None:
    pool = new_pool()
    admit(pool)

    async def ask(*_: object) -> list[Sample]:
        seconds.now_s += 4.0
        return [ANSWER]

    pool.ask = ask
    for number in range(3):
        seconds.now_s += 0.5
        await pool.sample_group([1], PARAMS, keys=[0])
        seconds.now_s += 0.25
        assert idle_s(pool) == 0.75, number


@in_loop
async def test_two_requests_at_a_time_count_their_union(seconds: Seconds) -> None:
    pool = new_pool()
    admit(pool)
    gates = [asyncio.Event(), asyncio.Event()]

    async def ask(*request: Any) -> list[Sample]:
        *_, (number,) = request
        await gates[number].wait()
        return [ANSWER]

    pool.ask = ask
    asks = [pool.sample_group([1], PARAMS, keys=[number]) for number in range(2)]
    tasks = [asyncio.ensure_future(each) for each in asks]
    for _ in range(5):
        await asyncio.sleep(0)
    for gate, task in zip(gates, tasks, strict=True):
        seconds.now_s += 1
        gate.set()
        await task
    seconds.now_s += 5
    assert idle_s(pool) == 5
