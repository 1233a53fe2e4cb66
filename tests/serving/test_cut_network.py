"""An engine behind a network of its own, which is cut: packets are lost, and nobody is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import httpx
import pytest

from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.health import HealthMonitor
from hybridrl.serving.router import PolicyRouter
from tests.config.values import config_of
from tests.end_to_end.two_machines import can_be_made
from tests.serving.echo import Addressed, echo_server
from tests.serving.pools import Pool

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not can_be_made(), reason="needs root, ip and unshare, to make a network namespace"
    ),
]

_NUMBER = os.getpid() % 2**14  # a network of each process, since tests run side by side
HERE, THERE = (f"10.98.{_NUMBER // 64}.{_NUMBER % 64 * 4 + host}" for host in (1, 2))
PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)
CONFIG = config_of(
    *("serving=own", "serving.router=sglang", "rollout=sglang", "rollout.num_slots=2")
)
LIMIT_S = 3600.0
"""Of a request: without a monitor, so long would one to the lost engine last."""

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
