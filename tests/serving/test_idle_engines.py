"""Seconds in which engines have no request, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from hybridrl.metrics import Max
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool

PARAMS = RequestParams(max_new_tokens=1, temperature=1.0)
ANSWER = Sample(torch.tensor([1]), torch.zeros(1), "stop", 0)


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


def new_pool() -> EnginePool:
    engine = cast(EngineHandle, object())
    pool = EnginePool({0: engine}, num_slots=2, max_context_tokens=9, vocab_size=9, version=-1)
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


def test_engines_are_idle_while_no_request_is_open(seconds: Seconds) -> None:
    pool = new_pool()
    admit(pool)

    async def ask(*_: object) -> list[Sample]:
        seconds.now_s += 4.0
        return [ANSWER]

    async def cycles() -> None:
        pool.ask = ask
        for number in range(3):
            seconds.now_s += 0.5
            await pool.sample_group([1], PARAMS, keys=[0])
            seconds.now_s += 0.25
            assert idle_s(pool) == 0.75, number

    asyncio.run(cycles())


def test_two_requests_at_a_time_count_their_union(seconds: Seconds) -> None:
    pool = new_pool()
    admit(pool)

    async def overlapping() -> None:
        gates = [asyncio.Event(), asyncio.Event()]

        async def ask(
            engine: EngineHandle,
            token_ids: Sequence[int] | Tensor,
            params: RequestParams,
            keys: Sequence[int],
        ) -> list[Sample]:
            await gates[keys[0]].wait()
            return [ANSWER]

        pool.ask = ask
        tasks = [
            asyncio.ensure_future(pool.sample_group([1], PARAMS, keys=[number]))
            for number in range(2)
        ]
        for _ in range(5):
            await asyncio.sleep(0)
        for gate, task in zip(gates, tasks, strict=True):
            seconds.now_s += 1
            gate.set()
            await task
        seconds.now_s += 5
        assert idle_s(pool) == 5

    asyncio.run(overlapping())
