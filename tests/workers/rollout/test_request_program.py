"""Requests of other threads to one engine, while it is opened, closed and drained."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError, RequestError
from hybridrl.images import Images
from hybridrl.sampler import Program, RequestParams, Sample, Sampler, T, request_key
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.event_loop import ProgramCall, RequestGate, run_program
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.request_listener import RequestProgram
from tests.workers.rollout.engines import ready_engine
from tests.workers.rollout.test_programs import context, require_equal, sample_alone

SHORT = RequestParams(max_new_tokens=6, temperature=1.0)


def request(server: RequestProgram, number: int) -> Future[list[Sample]]:
    return server.sample_group(context(number), SHORT, keys=(request_key(number, 0),))


def opened(folder: Path) -> tuple[HFRolloutEngine, RequestProgram]:
    engine = ready_engine(folder, num_slots=4)
    server = RequestProgram(engine)
    server.open()
    return engine, server


def test_requests_of_threads_get_what_a_program_samples(tiny_model: Path) -> None:
    engine, server = opened(tiny_model)
    answers = [request(server, 4 * number) for number in range(10)]
    samples = [answer.result(60)[0] for answer in answers]
    server.close()
    engine.pause()
    assert engine.drain(timeout_s=10) == 0
    engine.continue_generation()
    for number, sample in enumerate(samples):
        require_equal(sample, sample_alone(engine, 4 * number))


@pytest.mark.shows("2.11")
def test_a_closed_server_ends_its_requests_and_refuses_others(tiny_model: Path) -> None:
    engine, server = opened(tiny_model)
    answers = [request(server, number) for number in range(6)]
    server.close()
    with pytest.raises(PhaseError, match="a request was refused: the engine is paused"):
        request(server, 6)
    engine.pause()
    assert engine.drain(timeout_s=30) == 0
    assert all(len(answer.result(0)) == 1 for answer in answers)
    engine.continue_generation()
    server.open()
    assert len(request(server, 7).result(60)) == 1
    server.close()


def test_a_server_that_is_opened_before_it_ended_serves_on(tiny_model: Path) -> None:
    _, server = opened(tiny_model)
    answer = request(server, 1)
    server.close()
    server.open()
    assert len(request(server, 2).result(60)) == len(answer.result(60)) == 1
    server.close()


def test_a_caller_that_goes_away_does_not_hold_the_program(tiny_model: Path) -> None:
    engine, server = opened(tiny_model)
    answer = request(server, 1)
    assert not answer.cancel()
    server.close()
    engine.pause()
    assert engine.drain(timeout_s=60) == 0
    assert len(answer.result(0)) == 1


def test_the_loop_turns_before_while_and_after_it_is_open(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=4)
    server = RequestProgram(engine)
    server.turn().result(0)
    server.open()
    answer = request(server, 1)
    server.turn().result(60)
    server.close()
    engine.pause()
    engine.drain(timeout_s=60)
    assert len(answer.result(0)) == 1
    server.turn().result(60)


class StuckEngine:
    """Admits programs as engines do, and answers no request."""

    def __init__(self) -> None:
        self.gate = RequestGate()
        self.is_busy = threading.Event()

    def run(self, program: Program[T]) -> T:
        with self.gate.admit() as call:
            return run_program(program, StuckSampler(call, self.is_busy), call)


class StuckSampler(Sampler):
    max_context_tokens = 32

    def __init__(self, call: ProgramCall, is_busy: threading.Event) -> None:
        self._call = call
        self._is_busy = is_busy

    async def sample_group(
        self,
        token_ids: Sequence[int] | Tensor,
        params: RequestParams,
        *,
        keys: Sequence[int],
        images: Images = (),
    ) -> list[Sample]:
        with self._call.request(len(keys)):
            self._is_busy.set()
            await asyncio.Event().wait()
        return []


@pytest.mark.shows("2.9")
def test_a_drain_at_its_deadline_ends_open_requests_with_an_error() -> None:
    engine = StuckEngine()
    server = RequestProgram(cast(RolloutEngine, engine))
    server.open()
    answer = server.sample_group([1, 2], SHORT, keys=(1, 2))
    assert engine.is_busy.wait(60)
    server.close()
    engine.gate.pause()
    assert engine.gate.drain(0.0) == 2
    with pytest.raises(EngineError, match="a request got no answer: EngineError: aborted 2 of 2"):
        answer.result(60)


class DyingEngine(StuckEngine):
    """Its program has failed, and the thread that ran it has not come back yet."""

    def __init__(self) -> None:
        super().__init__()
        self.has_failed = threading.Event()
        self.may_return = threading.Event()

    def run(self, program: Program[T]) -> T:
        try:
            return super().run(program)
        finally:
            self.has_failed.set()
            assert self.may_return.wait(60)


def test_a_request_to_an_engine_that_just_failed_is_refused() -> None:
    engine = DyingEngine()
    server = RequestProgram(cast(RolloutEngine, engine))
    server.open()
    answer = server.sample_group([1, 2], SHORT, keys=(1,))
    assert engine.is_busy.wait(60)
    engine.gate.drain(0.0)
    assert engine.has_failed.wait(60)
    with pytest.raises(PhaseError, match="a request was refused"):
        server.sample_group([1, 2], SHORT, keys=(2,))
    server.turn().result(0)
    server.close()
    engine.may_return.set()
    with pytest.raises(EngineError, match="a request got no answer"):
        answer.result(60)


def test_a_refused_request_does_not_end_the_others(tiny_model: Path) -> None:
    _, server = opened(tiny_model)
    wrong = server.sample_group([], SHORT, keys=(1,))
    with pytest.raises(RequestError, match="is empty"):
        wrong.result(60)
    assert len(request(server, 1).result(60)) == 1
    server.close()


def test_an_engine_that_cannot_serve_says_so_when_it_is_opened(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model)
    engine.pause()
    with pytest.raises(PhaseError, match="the engine is paused"):
        RequestProgram(engine).open()
