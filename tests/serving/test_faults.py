"""Faults on purpose: when they come, and what becomes of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hybridrl.config.serving import FaultConfig, FaultKind
from hybridrl.errors import DriftError
from hybridrl.metrics import Sum
from hybridrl.sampler import RequestParams, Sample
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.requests import FaultPlan
from tests.serving.pools import Pool

PARAMS = RequestParams(max_new_tokens=4, temperature=1.0)


class HarmedEngine:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.harms: list[FaultKind] = []

    def harm(self, kind: FaultKind) -> None:
        self.harms.append(kind)


async def answer(
    engine: EngineHandle,
    token_ids: Sequence[int] | Tensor,
    params: RequestParams,
    keys: Sequence[int],
) -> list[Sample]:
    await asyncio.sleep(0)
    return [Sample(torch.tensor([key]), torch.zeros(1), "stop", 3) for key in keys]


class Rig:
    """Two engines that answer with the key of a request, but for planned faults."""

    def __init__(self, kind: FaultKind, *, every_num_phases: int = 1, within: int = 1) -> None:
        fault = FaultConfig(kind=kind, every_num_phases=every_num_phases, within_requests=within)
        self.plan = FaultPlan({"it": fault}, seed=7)
        self.engines = [HarmedEngine(), HarmedEngine()]
        self.pool = Pool(*self.engines, version=3)

    def sample(self) -> list[int]:
        """A phase of five requests, one after another."""
        self.pool = Pool(*self.engines, version=3)
        self.pool.ask = self.plan.spoil(answer)

        async def program() -> list[int]:
            groups = [await self.pool.sample_group([1], PARAMS, keys=[key]) for key in range(5)]
            return [int(sample.token_ids[0]) for (sample,) in groups]

        return asyncio.run(program())

    @property
    def num_repeated(self) -> object:
        return self.pool.take_metrics()["rollout/repeated_requests"]


@pytest.mark.parametrize("kind", ["error", "tokens", "logprobs"])
def test_a_spoiled_answer_is_repeated_on_the_other_engine(kind: FaultKind) -> None:
    rig = Rig(kind)
    assert rig.sample() == [0, 1, 2, 3, 4]
    assert rig.num_repeated == Sum(1)


def test_an_answer_of_another_version_ends_the_phase_by_name() -> None:
    with pytest.raises(DriftError, match=r"version \[1003\], and the policy is at version 3"):
        Rig("version").sample()


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_an_engine_that_has_a_request_is_harmed(kind: FaultKind) -> None:
    rig = Rig(kind)
    assert rig.sample() == [0, 1, 2, 3, 4]
    assert sorted(engine.harms for engine in rig.engines) == [[], [kind]]


def test_answers_of_a_cut_engine_are_lost_until_it_is_dropped() -> None:
    rig = Rig("cut", within=3)

    async def late(engine: EngineHandle, *request: Any) -> list[Sample]:
        for _ in range(20):  # so that both engines have requests when one is cut
            await asyncio.sleep(0)
        return await answer(engine, *request)

    async def program() -> list[int]:
        rig.pool.ask = rig.plan.spoil(late)
        asks = [rig.pool.sample_group([1], PARAMS, keys=[key]) for key in range(4)]
        tasks = [asyncio.ensure_future(each) for each in asks]
        for _ in range(200):
            await asyncio.sleep(0)
        [cut] = [index for index, engine in enumerate(rig.engines) if engine.harms == ["cut"]]
        assert [task.done() for task in tasks].count(False) == 2  # one was asked before the cut
        rig.pool.drop(cut, cast(EngineHandle, rig.engines[cut]), "it is not reached")
        return [int(sample.token_ids[0]) for (sample,) in await asyncio.gather(*tasks)]

    assert asyncio.run(program()) == [0, 1, 2, 3]
    assert rig.num_repeated == Sum(2)


def test_faults_come_in_their_phases_at_drawn_requests() -> None:
    rig = Rig("error", every_num_phases=3, within=5)
    repeated = [(rig.sample(), rig.num_repeated)[1] for _ in range(9)]
    assert repeated == [Sum(number) for number in (0, 0, 1) * 3]


def test_without_faults_no_request_passes_through_the_plan() -> None:
    assert FaultPlan({}, seed=7).spoil(answer) is answer
