from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Self, cast

import pytest
import torch

from hybridrl.config.serving import FaultConfig, FaultKind
from hybridrl.errors import DriftError
from hybridrl.metrics import Sum
from hybridrl.sampler import RequestParams, Sample, SampleRequest
from hybridrl.serving.engine_handle import EngineHandle, answered
from hybridrl.serving.requests import FaultPlan, PolicyRequests
from tests.config.values import config_of
from tests.serving.echo import Addressed
from tests.serving.elsewhere import elsewhere
from tests.serving.engines import Pool

PARAMS = RequestParams(max_new_tokens=8, temperature=1.0)


def samples_of(keys: Sequence[int], num_tokens: int = 1) -> list[Sample]:
    return [
        Sample(torch.full((num_tokens,), key), torch.zeros(num_tokens), "stop", 0) for key in keys
    ]


async def ask_all(pool: Pool, count: int) -> list[int]:
    """Ask for groups of one response at once; return the first tokens."""
    groups = [pool.sample_group([1, key], PARAMS, keys=[key]) for key in range(count)]
    return [int(sample.token_ids[0]) for (sample,) in await asyncio.gather(*groups)]


class Engine(Addressed):
    """Answers by itself with the keys of a request, and notes what is done to it."""

    def __init__(self, url: str | None = None) -> None:
        super().__init__(url)
        self.harms: list[FaultKind] = []

    def harm(self, kind: FaultKind) -> None:
        self.harms.append(kind)

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        return answered(samples_of(request.keys))


class SlowToOpen:
    """A sampler of one server that opens when a test says so; interrupted, it returns no tokens."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.is_interrupted = False

    async def __aenter__(self) -> Self:
        await self.may_open.wait()
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def take_metrics(self) -> dict[str, Any]:
        return {}

    def interrupt(self) -> None:
        self.is_interrupted = True

    async def answer(self, request: SampleRequest) -> list[Sample]:
        num_tokens = 0 if self.is_interrupted else request.params.max_new_tokens
        return samples_of(request.keys, num_tokens)


@pytest.fixture
def requests() -> PolicyRequests:
    return PolicyRequests(
        config_of("serving=own", "rollout=sglang"), vocab_size=1000, images=None, key="a-key"
    )


async def test_a_request_whose_server_is_being_opened_is_interrupted_as_well(
    requests: PolicyRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SlowToOpen()
    monkeypatch.setattr("hybridrl.serving.requests.connect", lambda *_, **__: server)
    engine = cast(EngineHandle, Addressed("http://server"))
    async with requests.open(Pool(), [engine], version=0) as ask:
        asking = asyncio.ensure_future(ask(engine, SampleRequest(torch.tensor([1]), PARAMS, [7])))
        await asyncio.sleep(0)
        await requests.interrupt([])
        server.may_open.set()
        assert [len(sample.token_ids) for sample in await asking] == [0]


def test_servers_are_asked_by_http_and_other_engines_by_calls(requests: PolicyRequests) -> None:
    async def program(url: str) -> list[int]:
        engines = [cast(EngineHandle, Engine(each)) for each in (url, None)]
        pool = Pool(*engines)
        async with requests.open(pool, engines, version=0) as pool.ask:
            tokens = await ask_all(pool, 6)
        assert pool.reasons == {}
        return tokens

    for _ in range(2):
        with elsewhere(key="a-key", weight_version="0") as server:
            assert asyncio.run(program(server.url)) == list(range(6))
            assert server.num_responses > 0
        metrics = requests.take_metrics()
        assert "rollout/prefix_cache_hit_fraction" in metrics  # of the server's sampler
        assert requests.take_metrics() == {}


# -- faults on purpose ---------------------------------------------------------------------------


async def answer(_: EngineHandle, request: SampleRequest) -> list[Sample]:
    await asyncio.sleep(0)
    return samples_of(request.keys)


class Rig:
    """Two engines that answer, but for planned faults."""

    def __init__(self, kind: FaultKind, *, every_num_phases: int = 1, within: int = 1) -> None:
        fault = FaultConfig(kind=kind, every_num_phases=every_num_phases, within_requests=within)
        self.plan = FaultPlan({"it": fault}, seed=7)
        self.engines = [Engine(), Engine()]

    def sample(self) -> int:
        """A phase of five requests, one after another; return how many were repeated."""
        pool = Pool(*self.engines)
        pool.ask = self.plan.spoil(answer)

        async def program() -> list[int]:
            groups = [await pool.sample_group([1], PARAMS, keys=[key]) for key in range(5)]
            return [int(sample.token_ids[0]) for (sample,) in groups]

        assert asyncio.run(program()) == [0, 1, 2, 3, 4]
        return int(pool.take_metrics()["rollout/repeated_requests"].value)


@pytest.mark.parametrize("kind", ["error", "tokens", "logprobs"])
def test_a_spoiled_answer_is_repeated_on_the_other_engine(kind: FaultKind) -> None:
    assert Rig(kind).sample() == 1


def test_an_answer_of_another_version_ends_the_phase_by_name() -> None:
    with pytest.raises(DriftError, match=r"version \[1000\], and the policy is at version 0"):
        Rig("version").sample()


async def test_answers_of_a_cut_engine_are_lost_until_it_is_dropped() -> None:
    rig = Rig("cut", within=3)
    pool = Pool(*rig.engines)

    async def late(engine: EngineHandle, *request: Any) -> list[Sample]:
        for _ in range(20):  # so that both engines have requests when one is cut
            await asyncio.sleep(0)
        return await answer(engine, *request)

    pool.ask = rig.plan.spoil(late)
    asking = asyncio.ensure_future(ask_all(pool, 4))
    for _ in range(200):
        await asyncio.sleep(0)
    [cut] = [index for index, engine in enumerate(rig.engines) if engine.harms == ["cut"]]
    assert not asking.done()
    pool.drop(cut, cast(EngineHandle, rig.engines[cut]), "it is not reached")
    assert await asking == [0, 1, 2, 3]
    assert pool.take_metrics()["rollout/repeated_requests"] == Sum(2)  # one from before the cut


def test_faults_come_in_their_phases_at_drawn_requests_if_any_are_planned() -> None:
    rig = Rig("error", every_num_phases=3, within=5)
    assert [rig.sample() for _ in range(9)] == [0, 0, 1] * 3
    assert FaultPlan({}, seed=7).spoil(answer) is answer
