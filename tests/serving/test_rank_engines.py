from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.errors import DriftError, EngineError, PhaseError, RequestError, ServerDiedError
from hybridrl.metrics import Sum
from hybridrl.network import Door
from hybridrl.sampler import Program, RequestParams, Sample, Sampler, SampleRequest, Scoring
from hybridrl.serving.engine_handle import RankHandle
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.plan import ModelPlan
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.server import RolloutServer
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.request_listener import RequestListener, request_body
from hybridrl.workers.rollout.single_turn import single_turn
from tests.serving.engines import Pool, RecordingHandle, plan_of, weights_in
from tests.waiting import wait_until
from tests.workers.rollout.engines import (
    VOCAB_SIZE,
    make_prompts,
    ready_engine,
    sampling_params,
    tokens_of,
)
from tests.workers.sharding.recording import Journal, rollout_config

PROMPTS = make_prompts([3, 9, 5, 2] * 2)
SAMPLING = sampling_params(group=2, tokens=12)
SHORT = RequestParams(max_new_tokens=4, temperature=1.0)
KEY = "a-key"
FIRST = 0
Ranks = list[tuple[HFRolloutEngine, RequestListener]]


@pytest.fixture
def ranks(model: Path) -> Iterator[Ranks]:
    engines = [ready_engine(model, num_slots=4) for _ in range(2)]
    listeners = [RequestListener(engine, door=Door(key=KEY)) for engine in engines]
    yield list(zip(engines, listeners, strict=True))
    for listener in listeners:
        listener.end()


@pytest.fixture
def lent() -> Iterator[Recovery]:
    recovery = recovery_of()
    yield recovery
    recovery.lend(())  # which closes the connections


def recovery_of(*, num_own: int = 0, health_timeout_s: float = 60.0) -> Recovery:
    """A model with engines of the manager's own, which serve, and lent ones."""
    journal = Journal()
    server = RolloutServer(
        plan_of(("regular", num_own)) if num_own else ModelPlan("policy", ()),
        lambda engine: RecordingHandle(engine.first_device, journal),
        config=rollout_config(start_timeout_s=20.0, stage_timeout_s=5.0),
    )
    server.start()
    return Recovery(server, health_timeout_s=health_timeout_s, key=KEY)


def new_pool() -> EnginePool:
    return Pool(num_slots=4, vocab_size=VOCAB_SIZE)


def sample(pool: EnginePool) -> list[Sample]:
    return asyncio.run(single_turn(PROMPTS, SAMPLING)(pool))


def test_ranks_sample_for_the_manager_bit_by_bit(ranks: Ranks, lent: Recovery, model: Path) -> None:
    engine = ready_engine(model)
    expected = engine.run(single_turn(PROMPTS, SAMPLING))
    for _ in range(3):
        pool = new_pool()
        lent.lend([listener.open() for _, listener in ranks])
        with lent.filling(pool):
            samples = sample(pool)
        for rank, listener in ranks:
            listener.close()
            rank.pause()
            assert rank.drain(timeout_s=10) == 0
            rank.continue_generation()
            assert rank.last_stats is not None  # each had a share
        assert tokens_of(samples) == tokens_of(expected)
        assert {sample.weight_version for sample in samples} == {0}
        assert lent.lost() == ()


ONE = SampleRequest(torch.tensor([1]), SHORT, (1,))


def test_each_refusal_has_its_own_error(ranks: Ranks, lent: Recovery) -> None:
    listener = ranks[0][1]
    url = listener.open()
    lent.lend([url])
    with lent.filling(new_pool()):
        engine = lent._watched()[FIRST]
        assert engine.address().result() is None
        assert engine.probe().result(60) != engine.probe().result(60)
        with pytest.raises(RequestError, match="the model knows 0 to 63"):
            engine.answer(SampleRequest(torch.tensor([VOCAB_SIZE]), SHORT, (1,))).result(60)
        with pytest.raises(PhaseError, match="was meant for an engine of others"):
            engine.harm("kill")
        listener.close()
        with pytest.raises(EngineError, match="status 500: PhaseError: a request was refused"):
            engine.answer(ONE).result(60)
    strange = RankHandle(url, key="another")
    with pytest.raises(EngineError, match="the key is wrong"):
        strange.answer(ONE).result(60)
    strange.end()


def test_an_engine_of_other_weights_ends_the_phase_and_is_not_taken_for_lost(
    ranks: Ranks, lent: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, listener = ranks[0]

    def run(program: Program[Any]) -> object:  # as SGLang's sampler finds it
        return asyncio.run(program(Drifted()))

    monkeypatch.setattr(engine, "run", run)
    pool = new_pool()
    lent.lend([listener.open()])
    with lent.filling(pool), pytest.raises(DriftError, match="by weights of version 7"):
        sample(pool)
    assert lent.lost() == ()


class Drifted(Sampler):
    max_context_tokens = 32

    async def answer(self, _: SampleRequest) -> list[Sample]:
        raise DriftError("a response was sampled by weights of version 7")


def test_a_rank_scores_tokens_that_are_there(ranks: Ranks, model: Path) -> None:
    listener = ranks[0][1]
    handle = RankHandle(listener.open(), key=KEY)
    request = SampleRequest(torch.arange(9), SHORT, (1,), scoring=Scoring(4, 3))
    (answer,) = handle.answer(request).result(60)
    handle.end()
    listener.close()

    async def score(sampler: Sampler) -> list[Sample]:
        return await sampler.answer(request)

    (expected,) = ready_engine(model).run(score)
    assert (answer.teacher_JL, expected.teacher_JL) != (None, None)
    torch.testing.assert_close(answer.teacher_JL, expected.teacher_JL, rtol=0, atol=0)
    assert answer.token_ids.tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("is_turn", [True, False])
def test_a_rank_keeps_the_keys_of_a_turn_for_the_next_one(ranks: Ranks, *, is_turn: bool) -> None:
    rank, listener = ranks[0]
    handle = RankHandle(listener.open(), key=KEY)
    first = SampleRequest(torch.tensor([1, 2, 3]), SHORT, (7,), is_turn=is_turn)
    (sample,) = handle.answer(first).result(60)
    context = torch.cat([first.token_ids, sample.token_ids, torch.tensor([4, 5])])
    handle.answer(replace(first, token_ids=context)).result(60)
    handle.end()
    listener.close()
    rank.pause()
    assert rank.drain(timeout_s=10) == 0
    known = len(first.token_ids) + len(sample.token_ids) - 1
    assert rank.last_stats is not None
    num_cached = rank.last_stats.num_context_tokens - rank.last_stats.num_prefill_tokens
    assert num_cached == (known if is_turn else 0)


GOOD = request_body(ONE)
PARAMS = GOOD["params"]
WRONG: list[dict[str, object]] = [
    {"token_ids": [[1, 2]]},
    {"token_ids": [1.5]},
    {"token_ids": [2**70]},
    {"params": PARAMS | {"top_k": "5"}},
    {"params": PARAMS | {"top_p": None}},
    {"keys": ["1"]},
    {"images": [{}]},
]
BAD_BODIES = [
    b"{",
    b"[" * 100_000,
    b"\xff",
    b"[]",
    *(json.dumps(GOOD | wrong).encode() for wrong in WRONG),
]


def test_what_is_no_request_is_refused_and_the_engine_serves_on(ranks: Ranks) -> None:
    url = ranks[0][1].open()

    def post(data: bytes, key: str = KEY) -> int:
        request = urllib.request.Request(f"{url}/sample_group", data=data)
        request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [post(body) for body in BAD_BODIES] == [400] * len(BAD_BODIES)
    assert post(json.dumps(GOOD).encode(), key="\xe9") == 401
    assert post(json.dumps(GOOD).encode()) == 200


@pytest.mark.shows("4.15")
def test_requests_of_a_lost_engine_go_to_another(ranks: Ranks, lent: Recovery, model: Path) -> None:
    expected = ready_engine(model).run(single_turn(PROMPTS, SAMPLING))
    ranks[0][1].open()  # the second one refuses all requests
    urls = [listener._url for _, listener in ranks]
    pool = new_pool()
    lent.lend(urls)
    with lent.filling(pool):
        samples = sample(pool)
        assert list(lent._watched()) == [FIRST]
    assert tokens_of(samples) == tokens_of(expected)
    assert lent.lost() == (1,)
    assert pool.take_metrics()["rollout/repeated_requests"].value > 0
    assert lent.take_metrics()["rollout/lost_engines"] == Sum(1)
    ranks[1][1].open()
    lent.lend(urls)
    with lent.filling(new_pool()):
        assert lent.lost() == ()
        assert list(lent._watched()) == [FIRST, FIRST + 1]
        assert lent.take_metrics()["rollout/replaced_engines"] == Sum(1)


@pytest.mark.shows("4.14")
def test_a_hung_engine_is_waited_for_no_longer() -> None:
    lent = recovery_of(health_timeout_s=0.3)
    pool = new_pool()
    # A port that takes connections and answers nothing, as a stopped process does.
    with socket.create_server(("127.0.0.1", 0)) as hung:
        lent.lend([f"http://127.0.0.1:{hung.getsockname()[1]}"])
        with (
            pytest.raises(ServerDiedError, match=r"serves; engine 0: no progress within"),
            lent.filling(pool),
            lent.monitor.watching(),
        ):
            sample(pool)
    assert lent.lost() == (0,)
    lent.lend(())


def test_engines_of_the_manager_come_before_lent_ones_and_are_replaced(tmp_path: Path) -> None:
    lent, pool = recovery_of(num_own=1), new_pool()
    server = lent._server
    server.update(weights_in(tmp_path / "weights", 0), version=0)
    own = server.serving_engines()[0]
    lent.lend(["http://127.0.0.1:9"])
    with lent.filling(pool):
        assert list(lent._watched()) == [0, 1]
        assert not pool.on_lost(1, lent._watched()[1], "gone")
        assert pool.on_lost(0, own, "gone")
        wait_until(lambda: server.ready_engines() and server.serving_engines()[0] is not own)
    assert lent.lost() == (0,)
    lent.lend(())
    server.shutdown()
