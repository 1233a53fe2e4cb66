"""An engine that will not drain: requests are answered or reported, in bounded time, none torn.

The time limit of a test is the bound that it shows.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hybridrl.errors import DeadlineError, EngineError
from hybridrl.metrics import Sum
from hybridrl.workers.rollout.sglang import engine as sglang
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from tests.sglang.engines import sglang_config
from tests.sglang.strangers import (
    generating,
    server_of,
    stopped_scheduler,
    stranger_asks,
    wait_until_running,
)
from tests.workers.rollout.engines import CPU, make_prompts, sampling_params, tokens_of

NUM_REQUESTS = 200
PROMPTS = make_prompts([3 + place % 5 for place in range(NUM_REQUESTS // 8)])
GREEDY = sampling_params(group=1, tokens=6, temperature=0.0)
SHORT_TIMEOUT_S = 3.0
KEEPING_MODES = ["in_place", "retract"]


def managed(engine: SGLangEngine, *, drain_timeout_s: float) -> ManagedEngine:
    config = sglang_config(drain_timeout_s=drain_timeout_s, sleep=True)
    return ManagedEngine(engine, config=config, device=CPU)


def require_serving(engine: SGLangEngine) -> None:
    """The engine answers as it did: the same tokens, twice."""
    found = [tokens_of(engine.run(single_turn(make_prompts((4, 9)), GREEDY))) for _ in range(2)]
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0])


@pytest.mark.shows("2.9")
@pytest.mark.timeout(200)
def test_all_200_requests_under_drain_are_answered_or_reported(
    engine: SGLangEngine,
) -> None:
    for _ in range(2):
        impatient = managed(engine, drain_timeout_s=0.3)
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=80)) as call:
            impatient.pause()
            impatient.drain()
            with pytest.raises(EngineError, match=f"aborted [0-9]+ of {NUM_REQUESTS} requests"):
                call.result()
        aborted = impatient.take_metrics()["rollout/aborted_requests"]
        assert isinstance(aborted, Sum)
        assert 0 < aborted.value <= NUM_REQUESTS
        impatient.release_cache()
        assert impatient.take_metrics()["memory/noop_releases"] == Sum(2)
        impatient.resume_cache()
        impatient.continue_generation()

        patient = managed(engine, drain_timeout_s=100.0)
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=20)) as call:
            patient.pause()
            patient.drain()
            assert [len(r.token_ids) for r in call.result()] == [20] * NUM_REQUESTS
        assert "rollout/aborted_requests" not in patient.take_metrics()
        patient.continue_generation()


@pytest.mark.shows("1.19")
@pytest.mark.timeout(150)
def test_requests_that_a_stranger_cuts_off_are_asked_for_again(
    engine: SGLangEngine,
) -> None:
    for _ in range(2):
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=40)) as call:
            server_of(engine).post("/abort_request", abort_all=True)
            assert [len(r.token_ids) for r in call.result()] == [40] * NUM_REQUESTS
        retried = engine.take_metrics()["rollout/retried_requests"]
        assert isinstance(retried, Sum)
        assert retried.value > 0


@pytest.mark.shows("2.10")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", KEEPING_MODES)
def test_requests_that_a_strangers_pause_keeps_are_reported(
    engine: SGLangEngine, mode: str
) -> None:
    for _ in range(2):
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=80)) as call:
            server_of(engine).post("/pause_generation", mode=mode)
            engine.pause()
            assert engine.drain(timeout_s=0.3) > 0
            with pytest.raises(EngineError, match="aborted"):
                call.result()
        engine.continue_generation()
        require_serving(engine)


@pytest.mark.shows("2.9")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", KEEPING_MODES)
def test_a_strangers_endless_request_does_not_hold_up_the_drain(
    engine: SGLangEngine, mode: str
) -> None:
    for _ in range(2):
        with ThreadPoolExecutor(max_workers=1) as pool:
            theirs = pool.submit(stranger_asks, engine, num_requests=NUM_REQUESTS)
            wait_until_running(engine, theirs)
            server_of(engine).post("/pause_generation", mode=mode)
            engine.pause()
            assert engine.drain(timeout_s=0.3) == 0
            reasons = {each["meta_info"]["finish_reason"]["type"] for each in theirs.result()}
            assert "abort" in reasons
        engine.continue_generation()
        require_serving(engine)


@pytest.mark.shows("2.8")
@pytest.mark.timeout(150)
def test_a_scheduler_that_hangs_is_named_and_may_come_back(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "FLUSH_TIMEOUT_S", SHORT_TIMEOUT_S)
    monkeypatch.setattr(sglang, "ABORT_GRACE_S", SHORT_TIMEOUT_S)
    for _ in range(2):
        sampling = sampling_params(group=8, tokens=80)
        with generating(engine, PROMPTS, sampling) as call, stopped_scheduler(engine):
            engine.pause()
            with pytest.raises(DeadlineError, match=r"still busy 3 s.*requests running and"):
                engine.drain(timeout_s=0.3)
            with pytest.raises(EngineError, match=f"aborted [0-9]+ of {NUM_REQUESTS}"):
                call.result()
        assert engine.drain(timeout_s=10.0) == 0
        engine.continue_generation()
        require_serving(engine)


@pytest.mark.timeout(150)
def test_only_a_server_that_makes_no_token_is_late(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = replace(engine._spec.rollout, request_timeout_s=1.0)
    monkeypatch.setattr(engine, "_spec", replace(engine._spec, rollout=limit))
    sampling, begin = sampling_params(group=8, tokens=80), time.monotonic()
    with generating(engine, PROMPTS, sampling) as call:
        assert [len(r.token_ids) for r in call.result()] == [80] * NUM_REQUESTS
    assert time.monotonic() - begin > 2.0
    late = pytest.raises(DeadlineError, match=r"no progress within rollout\.request_timeout_s=1")
    with generating(engine, PROMPTS, sampling) as call, stopped_scheduler(engine), late:
        call.result(15.0)
    require_serving(engine)
