"""Engines that are handed to requests: cancelled requests, refused ones, memory."""

from __future__ import annotations

import asyncio
import gc
from typing import cast

import pytest

from hybridrl.errors import ServerDiedError
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import Member, RequestQueue


def members_of(queue: RequestQueue, number: int) -> list[Member]:
    members = [Member(index, cast(EngineHandle, None), 0) for index in range(number)]
    for member in members:
        queue.add(member)
    return members


def test_a_refusal_reaches_those_that_wait_behind_a_cancelled_one() -> None:
    async def program() -> None:
        queue = RequestQueue(num_slots=1)
        cancelled, waiting = [asyncio.ensure_future(queue.take(1)) for _ in range(2)]
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        queue.refuse(ServerDiedError("all are gone"))
        with pytest.raises(ServerDiedError, match="all are gone"):
            await waiting

    asyncio.run(program())


def test_a_queue_keeps_nothing_of_requests_that_ended() -> None:
    async def program() -> int:
        queue = RequestQueue(num_slots=4)
        members = members_of(queue, 2)
        await queue.take(2)
        for _ in range(1000):
            member = await queue.take(1)
            queue.give_back(member, 1)
        return sum(len(gc.get_referrers(member)) for member in members)

    assert asyncio.run(program()) < 50
