"""Two real servers and two ranks: requests go to the idle one; what happens when one is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.metrics import Mean
from hybridrl.sampler import RequestParams, Sample, Sampler
from hybridrl.workers.rollout.directory import EngineDirectory
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.engines import make_ready, server_spec, sync, weights_of
from tests.sglang.strangers import kill_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

NUM_SHORT = 60
SHORT = RequestParams(max_new_tokens=4, temperature=1.0)
LONG = RequestParams(max_new_tokens=90, temperature=1.0)


class Ranks(NamedTuple):
    """Two ranks as they are in a rollout phase, in one process."""

    engines: tuple[SGLangEngine, ...]
    directories: tuple[EngineDirectory, ...]

    def begin_phase(self) -> None:
        for directory in self.directories:
            directory.learn([each.own for each in self.directories])


@pytest.fixture(scope="module")
def ranks(served_model: Path) -> Iterator[Ranks]:
    directories = (EngineDirectory(2), EngineDirectory(2))
    with ExitStack() as stack:
        engines = []
        for directory in directories:
            engine = SGLangEngine(server_spec(served_model), variables={}, directory=directory)
            stack.callback(engine.shutdown)
            engines.append(engine)
        yield Ranks(tuple(engines), directories)


async def one_long_many_short(sampler: Sampler) -> list[Sample]:
    """All requests are this rank's; the long conversation ends last."""

    async def converse() -> list[Sample]:
        samples, context = [], [1, 2, 3]
        while len(context) < 80:
            samples.append(await sampler.sample(context, SHORT, key=len(context)))
            context += [*samples[-1].token_ids.tolist(), 5, 6]
        return samples

    async def ask(key: int) -> list[Sample]:
        return [await sampler.sample([key, 7], SHORT, key=key)]

    parts = await asyncio.gather(converse(), *(ask(key) for key in range(NUM_SHORT)))
    return [sample for part in parts for sample in part]


def test_a_ranks_requests_go_to_the_idle_engine(ranks: Ranks, served_model: Path) -> None:
    for engine in ranks.engines:
        make_ready(engine, served_model)
    ranks.begin_phase()

    samples = ranks.engines[0].run(one_long_many_short)

    assert all(len(sample.token_ids) == 4 for sample in samples)
    share = ranks.engines[0].take_metrics()["rollout/foreign_response_fraction"]
    assert isinstance(share, Mean)
    assert 0.3 < share.value < 0.7
    assert [ranks.directories[0].load(engine) for engine in range(2)] == [0, 0]


def test_a_foreign_engine_of_other_weights_is_refused(ranks: Ranks, served_model: Path) -> None:
    for engine in ranks.engines:
        make_ready(engine, served_model)
    ranks.begin_phase()
    sync(ranks.engines[0], weights_of(served_model), version=1)
    with pytest.raises(EngineError, match="weights of version 0, and the policy is at 1"):
        ranks.engines[0].run(one_long_many_short)


def test_a_killed_foreign_engine_is_named_and_replaced(ranks: Ranks, served_model: Path) -> None:
    for engine in ranks.engines:
        make_ready(engine, served_model)
    ranks.begin_phase()

    async def lose_the_other(sampler: Sampler) -> None:
        work = [sampler.sample([key, 7], LONG, key=key) for key in range(NUM_SHORT)]
        asyncio.get_running_loop().call_later(0.3, kill_server, ranks.engines[1])
        await asyncio.gather(*work)

    with pytest.raises(EngineError, match="SGLang of engine 1"):
        ranks.engines[0].run(lose_the_other)
    with pytest.raises(ServerDiedError, match="killed by SIGKILL"):  # so the phase ends, everywhere
        ranks.engines[1].drain(timeout_s=1.0)
    ranks.engines[1].restart()
    for engine in ranks.engines:
        make_ready(engine, served_model)
    assert [directory.has_news for directory in ranks.directories] == [False, True]
    ranks.begin_phase()
    assert len(ranks.engines[0].run(one_long_many_short)) > NUM_SHORT
