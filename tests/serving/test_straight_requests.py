"""Requests to servers without a router: each server's sampler opens when it is first asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import pytest
import torch

from hybridrl.metrics import Metrics
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle, answered
from hybridrl.serving.requests import PolicyRequests
from tests.config.values import config_of
from tests.serving.echo import Addressed, echo_server
from tests.serving.pools import Pool

CONFIG = config_of("serving=own", "rollout=sglang")
PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)


class Asked(Addressed):
    """An engine that answers by itself without an address."""

    def sample_group(
        self, token_ids: Sequence[int], params: RequestParams, *, keys: Sequence[int]
    ) -> Future[list[Sample]]:
        return answered([_sample(params.max_new_tokens, seed=key) for key in keys])


def _sample(num_tokens: int, *, seed: int = 0) -> Sample:
    tokens = torch.full((num_tokens,), seed)
    return Sample(tokens, torch.zeros(num_tokens), "length", 0)


class SlowToOpen:
    """A sampler of one server that opens when a test says so; interrupted, it returns no tokens."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.is_interrupted = False

    async def __aenter__(self) -> SlowToOpen:
        await self.may_open.wait()
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def metrics(self) -> Metrics:
        return {}

    def interrupt(self) -> None:
        self.is_interrupted = True

    async def sample_group(
        self, _: Sequence[int], params: RequestParams, *, keys: Sequence[int]
    ) -> list[Sample]:
        return [_sample(0 if self.is_interrupted else params.max_new_tokens) for _ in keys]


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_request_whose_server_is_being_opened_is_interrupted_as_well(
    monkeypatch: pytest.MonkeyPatch, *, interrupts: bool
) -> None:
    requests = PolicyRequests(CONFIG, vocab_size=1000, key="a-key")

    async def program() -> list[int]:
        server = SlowToOpen()
        monkeypatch.setattr("hybridrl.serving.requests.connect", lambda *_, **__: server)
        engine = cast(EngineHandle, Addressed("http://server"))
        async with requests.open(Pool(), [engine], version=0) as ask:
            asking = asyncio.ensure_future(ask(engine, [1], PARAMS, [7]))
            await asyncio.sleep(0)
            if interrupts:
                await requests.interrupt([])
            server.may_open.set()
            return [len(sample.token_ids) for sample in await asking]

    assert asyncio.run(program()) == [0 if interrupts else 8]


def test_servers_are_asked_by_http_and_other_engines_by_calls() -> None:
    requests = PolicyRequests(CONFIG, vocab_size=1000, key="a-key")

    async def program(url: str) -> list[Sample]:
        engines = [cast(EngineHandle, Asked(each)) for each in (url, None)]
        pool = Pool(*engines)
        async with requests.open(pool, engines, version=0) as pool.ask:
            asks = [pool.sample_group([1, n], PARAMS, keys=[n, 100 + n]) for n in range(6)]
            return [sample for group in await asyncio.gather(*asks) for sample in group]

    for _ in range(2):
        with echo_server() as (url, _):
            samples = asyncio.run(program(url))
        assert [int(s.token_ids[0]) for s in samples] == [k for n in range(6) for k in (n, 100 + n)]
        metrics = requests.take_metrics()
        assert "rollout/prefix_cache_hit_fraction" in metrics  # of the server's sampler
        assert requests.take_metrics() == {}
