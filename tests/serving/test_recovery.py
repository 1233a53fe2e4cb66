from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from hybridrl.config.serving import WorkerType
from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.metrics import Sum
from hybridrl.sampler import RequestParams, Sample, SampleRequest
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.recovery import Recovery
from hybridrl.workers.sharding.lifecycle import State
from tests.serving.engines import RecordingHandle, ServerRig, plan_of
from tests.waiting import wait_until
from tests.workers.sharding.recording import Journal

PARAMS = RequestParams(max_new_tokens=4, temperature=1.0)


class AnsweringHandle(RecordingHandle):
    """Answers with its index, once its gate is open; a dead one fails its requests."""

    def __init__(self, index: int, journal: Journal, process: int = 0) -> None:
        super().__init__(index, journal)
        self.process = process
        self.open: list[tuple[int, Future[list[Sample]]]] = []
        self.version = 0
        self.is_open = False
        self.built: Future[None] = Future()

    def build(self) -> Future[None]:
        self.built = super().build()
        return self.built

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        future: Future[list[Sample]] = Future()
        future.set_running_or_notify_cancel()  # as Ray's calls, it cannot be cancelled
        if not self.is_alive():
            future.set_exception(EngineError("it is gone"))
            return future
        self.open.append((len(request.keys), future))
        if self.is_open:
            self.release()
        return future

    def release(self) -> None:
        """Answer all requests, these and all that follow."""
        self.is_open = True
        while self.open:
            count, future = self.open.pop(0)
            answer = Sample(torch.tensor([self.process]), torch.zeros(1), "stop", self.version)
            future.set_result([answer] * count)

    def kill(self) -> None:
        super().kill()
        while self.open:
            self.open.pop(0)[1].set_exception(EngineError("it is gone"))


class Rig(ServerRig[AnsweringHandle]):
    def __init__(
        self,
        num_engines: int = 2,
        *,
        kind: WorkerType = "regular",
        num_prefills: int = 0,
        **settings: Any,
    ) -> None:
        prefills: list[tuple[WorkerType, int]] = [("prefill", num_prefills)] if num_prefills else []
        super().__init__(AnsweringHandle, plan_of((kind, num_engines), *prefills), **settings)
        self.num_silent: Counter[int] = Counter()
        """Processes that never start, by engine."""
        self.server.start()
        self.update(0)
        self.recovery = Recovery(self.server, health_timeout_s=60.0)
        self.pool = self.new_pool()

    def prepare(self, handle: AnsweringHandle) -> None:
        handle.process = len(self.launched)
        if handle.process >= len(self.plan.engines) and self.num_silent[handle.index]:
            self.num_silent[handle.index] -= 1
            handle.is_silent = True

    def wait_for_replacement(self) -> None:
        """Until the third process has a request."""
        wait_until(lambda: len(self.launched) == 3 and self.launched[2].open)

    def answer(self, *processes: int) -> None:
        for process in processes:
            self.launched[process].release()

    def new_pool(self) -> EnginePool:
        return self.server.pool(max_context_tokens=32, vocab_size=100, version=0)

    def sample(self, num_requests: int) -> Future[list[int]]:
        """Ask for responses in a thread; the future has the processes that gave them."""
        future: Future[list[int]] = Future()

        async def program() -> list[int]:
            asks = [self.pool.sample_group([n], PARAMS, keys=[n]) for n in range(num_requests)]
            return [int(sample.token_ids[0]) for (sample,) in await asyncio.gather(*asks)]

        def run() -> None:
            try:
                with self.recovery.filling(self.pool):
                    future.set_result(asyncio.run(program()))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        wait_until(lambda: sum(len(h.open) for h in self.launched) or future.done())
        return future


@pytest.mark.shows("4.15")
def test_a_replacement_joins_the_pool_of_the_running_phase() -> None:
    rig = Rig(2)
    answers = rig.sample(6)
    rig.launched[0].kill()
    rig.wait_for_replacement()
    assert len(rig.launched[1].open) == 2  # it was asked nothing else meanwhile
    rig.answer(1, 2)
    assert set(answers.result(60)) == {1, 2}
    counts = rig.server.take_metrics()
    assert counts["rollout/lost_engines"] == counts["rollout/replaced_engines"] == Sum(1)
    assert counts["time/replace_engine_s"].value > 0


def test_a_replacement_that_comes_after_the_phase_serves_the_next() -> None:
    rig = Rig(2)
    rig.launched[1].is_open = True
    answers = rig.sample(3)
    rig.launched[0].kill()
    assert answers.result(60) == [1, 1, 1]
    wait_until(lambda: len(rig.launched) == 3)
    wait_until(lambda: rig.server.states == (State.READY, State.READY))
    assert rig.server.take_metrics()["rollout/replaced_engines"] == Sum(1)
    rig.pool = rig.new_pool()
    answers = rig.sample(2)
    assert len(rig.launched[2].open) == 1
    rig.launched[2].release()
    assert sorted(answers.result(60)) == [1, 2]


def test_the_late_end_of_a_dropped_start_is_not_that_of_its_successor() -> None:
    rig = Rig(1, start_timeout_s=0.3)
    rig.num_silent[0] = 1
    answers = rig.sample(1)
    rig.launched[0].kill()
    wait_until(lambda: len(rig.launched) == 3)
    dropped, successor = rig.launched[1:3]
    dropped.built.set_exception(EngineError("it is gone"))
    wait_until(lambda: successor.open)
    successor.release()
    assert answers.result(60) == [2]
    assert len(rig.launched) == 3


def test_an_engine_that_hangs_is_replaced_once_however_often_it_is_reported() -> None:
    rig = Rig()
    answers = rig.sample(4)
    for _ in range(3):
        assert rig.recovery.report(0, rig.launched[0], "it does not get on")
    rig.wait_for_replacement()
    assert not rig.launched[0].is_alive()
    assert rig.recovery.report(0, rig.launched[0], "a request of it timed out")  # late
    rig.answer(1, 2)
    assert sorted(answers.result(60)) == [1, 1, 2, 2]
    assert len(rig.launched) == 3
    assert rig.launched[2].is_alive()
    assert rig.server.take_metrics()["rollout/lost_engines"] == Sum(1)


def test_a_phase_that_begins_without_engines_waits_for_new_ones() -> None:
    rig = Rig(1)
    rig.launched[0].kill()
    assert rig.server.lose(0, rig.launched[0], "it failed")
    rig.server.give_up(0)
    rig.pool = rig.new_pool()
    answers = rig.sample(2)
    assert rig.launched[1].is_alive()
    rig.launched[1].release()
    assert answers.result(60) == [1, 1]


def test_each_phase_counts_failed_replacements_anew() -> None:
    rig = Rig(1, start_timeout_s=0.3)
    rig.num_silent[0] = 3
    answers = rig.sample(2)
    rig.launched[0].kill()
    with pytest.raises(ServerDiedError, match=r"3 replacements failed.*did not start within 0.3"):
        answers.result(60)
    assert len(rig.launched) == 4
    rig.pool = rig.new_pool()
    answers = rig.sample(2)
    rig.launched[-1].kill()
    wait_until(lambda: rig.launched[-1].open)
    rig.launched[-1].release()
    assert answers.result(60) == [rig.launched[-1].process] * 2


@pytest.mark.shows("4.12")
def test_a_lost_prefill_engine_is_replaced_and_asked_for_no_response() -> None:
    rig = Rig(1, kind="decode", num_prefills=1)
    answers = rig.sample(2)
    assert rig.recovery.report(1, rig.launched[1], "it does not get on")
    wait_until(lambda: len(rig.launched) == 3 and rig.server.states == (State.READY,) * 2)
    assert not rig.launched[1].is_alive()
    rig.launched[0].release()
    assert answers.result(60) == [0, 0]
    assert not rig.launched[2].open


def test_a_phase_does_not_wait_for_prefill_engines() -> None:
    rig = Rig(1, kind="decode", num_prefills=1, start_timeout_s=0.05)
    for handle in rig.launched:
        handle.kill()
    rig.num_silent[0] = 3  # the other one comes, and answers nobody
    with pytest.raises(ServerDiedError, match="engine 0: 3 replacements failed"):
        rig.sample(2).result(60)
