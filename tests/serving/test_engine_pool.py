from __future__ import annotations

import asyncio
import gc
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import FrameType

import pytest
import torch

from hybridrl.errors import DriftError, EngineError, PhaseError, ServerDiedError
from hybridrl.metrics import Max, Sum
from hybridrl.sampler import FinishReason, RequestParams, Sample, SampleRequest
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.engine_pool import EnginePool, Member, RequestQueue
from hybridrl.workers.rollout.prefixes import STAY, KnownPrefixes, prefix_sums
from tests.serving.engines import Pool

PARAMS = RequestParams(max_new_tokens=4, temperature=1.0)
CUT: FinishReason = "interrupted"


class OpenEngine(EngineHandle):
    """Keeps requests open until a test answers them."""

    def __init__(self) -> None:
        self.open: list[tuple[int, Future[list[Sample]]]] = []
        self.asked: list[tuple[list[int], int, list[int]]] = []
        """Contexts, tokens at most, and keys."""

    def answer(self, request: SampleRequest) -> Future[list[Sample]]:
        future: Future[list[Sample]] = Future()
        context, keys = request.token_ids.tolist(), list(request.keys)
        self.asked.append((context, request.params.max_new_tokens, keys))
        self.open.append((len(keys), future))
        return future

    @property
    def contexts(self) -> list[int]:
        return [context[0] for context, _, _ in self.asked]

    def probe(self) -> Future[object]:
        raise NotImplementedError

    def end(self) -> None: ...

    def release(self, *, version: int = 3) -> None:
        size, future = self.open.pop(0)
        future.set_result([sample(version)] * size)

    def answer_with(self, *samples: Sample) -> None:
        self.open.pop(0)[1].set_result(list(samples))

    async def fail(self, error: Exception) -> None:
        self.open.pop(0)[1].set_exception(error)
        await settle()


def sample(version: int = 3) -> Sample:
    return Sample(torch.tensor([1]), torch.zeros(1), "stop", version)


def cut(*tokens: int) -> Sample:
    """A response that was interrupted after these tokens."""
    return Sample(torch.tensor(tokens, dtype=torch.int64), torch.zeros(len(tokens)), CUT, 3)


Asking = asyncio.Task[list[Sample]]
pool_of = partial(Pool, vocab_size=10, version=3)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def ask(pool: EnginePool, context: int, num_keys: int = 1) -> Asking:
    return asyncio.ensure_future(pool.sample_group([context], PARAMS, keys=range(num_keys)))


async def asked(pool: EnginePool, *contexts: int, num_keys: int = 1) -> list[Asking]:
    tasks = [ask(pool, context, num_keys) for context in contexts]
    await settle()
    return tasks


async def answer_all(*engines: OpenEngine) -> None:
    while any(engine.open for engine in engines):
        next(engine for engine in engines if engine.open).release()
        await settle()


async def test_work_is_handed_to_engines_as_they_become_free() -> None:
    pool = pool_of(one := OpenEngine(), other := OpenEngine())
    tasks = await asked(pool, *range(7))
    assert (one.contexts, other.contexts) == ([0, 2], [1, 3])
    for _ in range(3):
        other.release()
        await settle()
    assert (one.contexts, other.contexts) == ([0, 2], [1, 3, 4, 5, 6])
    await answer_all(one, other)
    assert [len(task.result()) for task in tasks] == [1] * 7


async def test_open_requests_of_a_dropped_engine_go_elsewhere_at_once() -> None:
    pool = pool_of(one := OpenEngine(), other := OpenEngine())
    tasks = await asked(pool, *range(3), num_keys=2)
    assert (one.contexts, other.contexts) == ([0], [1])
    pool.drop(0, OpenEngine(), "a report of an engine before it")
    await settle()
    assert pool.reasons == {}
    for _ in range(2):
        pool.drop(0, one, "it does not get on")
    await settle()
    assert pool.reasons == {0: "it does not get on"}
    assert one.open[0][1].cancelled()
    for context in (2, 0):
        other.release()
        await settle()
        assert other.contexts[-1] == context
    other.release()
    assert [len(await task) for task in tasks] == [2, 2, 2]
    assert pool.take_metrics()["rollout/repeated_requests"] == Sum(2)


@pytest.mark.parametrize("num_open", [STAY, STAY + 1])
async def test_a_later_turn_returns_to_the_engine_with_its_prefix(num_open: int) -> None:
    holder, other = OpenEngine(), OpenEngine()
    pool = pool_of(holder, other, num_slots=20)
    pool.prefixes = KnownPrefixes()
    await asked(pool, 5)
    holder.release()  # with the token 1
    await asked(pool, *range(100, 100 + 2 * num_open))
    for _ in range(num_open):
        other.release()
    await settle()
    turn = asyncio.ensure_future(pool.sample_group([5, 1, 2], PARAMS, keys=[0]))
    await settle()
    asked_last = [engine for engine in (holder, other) if engine.contexts[-1] == 5]
    assert asked_last == [holder if num_open == STAY else other]
    turn.cancel()


def test_the_longest_known_beginning_counts() -> None:
    known = KnownPrefixes()
    known.add(prefix_sums([1, 2]), 0)
    known.add(prefix_sums([1, 2, 3, 4]), 1)
    contexts = [[1, 2, 3], [1, 2, 3, 4, 5], [2, 1]]
    assert [known.find(prefix_sums(context)) for context in contexts] == [0, 1, None]


async def test_a_request_that_waits_for_an_engine_that_is_given_up_is_told_why() -> None:
    pool = pool_of(OpenEngine())
    pool.suspend(0)
    (task,) = await asked(pool, 5)
    pool.give_up(0, "it could not load the weights")
    with pytest.raises(ServerDiedError, match="engine 0: it could not load the weights"):
        await task


async def test_a_late_failure_of_an_old_engine_does_not_lose_the_new_one() -> None:
    pool, new = pool_of(one := OpenEngine()), OpenEngine()
    (task,) = await asked(pool, 0)
    pool.join(0, new)
    await settle()
    await one.fail(EngineError("it is gone"))
    new.release()
    assert len(await task) == 1
    assert pool.reasons == {}


async def test_a_request_that_loses_every_engine_is_not_sent_forever() -> None:
    engines = [OpenEngine() for _ in range(6)]
    pool = pool_of(*engines)
    (task,) = await asked(pool, 0)
    for engine in engines[:4]:
        await engine.fail(EngineError("logits are not finite"))
    with pytest.raises(ServerDiedError, match=r"4 rollout engines.*logits are not finite"):
        await task
    assert set(pool.reasons) == {0, 1, 2, 3}


async def test_interrupted_responses_continue_on_other_engines() -> None:
    """Of a group of four, one sibling has ended, one has tokens, and two have none."""
    pool = pool_of(one := OpenEngine(), other := OpenEngine(), num_slots=8)
    (task,) = await asked(pool, 5, num_keys=4)
    pool.suspend(0)
    await settle()
    one.answer_with(sample(), cut(7, 8), cut(), cut())
    await settle()
    assert one.asked == [([5], 4, [0, 1, 2, 3])]
    assert other.asked == [([5, 7, 8], 2, [1]), ([5], 4, [2, 3])]
    other.answer_with(sample())
    other.answer_with(cut(2), sample())  # and the other engine is next
    pool.suspend(1)
    pool.join(0, one, version=4)
    await settle()
    assert one.asked[1:] == [([5, 2], 3, [2])]
    one.release(version=4)
    samples = await task
    assert [s.token_ids.tolist() for s in samples] == [[1], [7, 8, 1], [2, 1], [1]]
    assert [s.versions_L.tolist() for s in samples] == [[3], [3, 3, 3], [3, 4], [3]]
    assert not any(s.is_interrupted for s in samples)
    assert pool.reasons == {}
    metrics = pool.take_metrics()
    assert metrics["rollout/interrupted_responses"] == Sum(2)
    assert metrics["rollout/interrupted_tokens"] == Sum(3)


async def test_interrupted_responses_may_lose_their_tokens_instead() -> None:
    """Of a group of three, one sibling has ended, one has tokens, and one has none."""
    pool = pool_of(one := OpenEngine(), num_slots=8)
    pool.drops_interrupted = True
    (task,) = await asked(pool, 5, num_keys=3)
    pool.suspend(0)
    await settle()
    one.answer_with(sample(), cut(7, 8), cut())
    pool.join(0, one, version=4)
    await settle()
    assert one.asked[1:] == [([5], 4, [1, 2])]  # those that lost theirs share a request again
    one.release(version=4)
    samples = await task
    assert [s.token_ids.tolist() for s in samples] == [[1], [1], [1]]
    assert [s.versions_L.tolist() for s in samples] == [[3], [4], [4]]
    assert pool.reasons == {}
    metrics = dict(pool.take_metrics())
    del metrics["time/engines_idle_s"]
    assert metrics == {
        "rollout/repeated_requests": Sum(0),
        "rollout/aborted_responses": Sum(1),
        "rollout/aborted_tokens": Sum(2),
    }


async def test_a_request_that_meets_a_paused_engine_loses_nothing() -> None:
    """It was handed out just before the engine was suspended, and is asked again."""
    pool = pool_of(one := OpenEngine(), other := OpenEngine())
    (task,) = await asked(pool, 5)
    for _ in range(9):
        pool.suspend(0)
        await one.fail(PhaseError("the engine is paused"))
        other.answer_with(cut())
        pool.suspend(1)
        pool.join(0, one, version=3)
        pool.join(1, other, version=3)
        await settle()
        (holder,) = [engine for engine in (one, other) if engine.open]
        if holder is other:
            other.release()
            break
    else:
        one.release()
    await task
    assert pool.reasons == {}


async def test_an_answer_of_before_the_update_has_its_version() -> None:
    """The answer arrives after the engine has new weights; the next one must have these."""
    pool = pool_of(one := OpenEngine())
    (task,) = await asked(pool, 5)
    pool.suspend(0)
    pool.join(0, one, version=4)
    await settle()
    one.release(version=3)
    assert (await task)[0].weight_version == 3
    (task,) = await asked(pool, 6)
    one.release(version=3)
    with pytest.raises(DriftError, match=r"version \[3\], and the policy is at version 4"):
        await task


async def test_an_engine_that_joins_twice_keeps_its_open_requests() -> None:
    pool = pool_of(engine := OpenEngine(), num_slots=1)
    (task,) = await asked(pool, 5)
    pool.join(0, engine)  # as a late recovery does
    (waiting,) = await asked(pool, 6)
    assert engine.contexts == [5]  # it has one slot
    pool.suspend(0)
    drained = asyncio.ensure_future(pool.drained())
    await settle()
    assert not drained.done()
    engine.release()
    await settle()
    assert drained.done()
    assert task.done()
    waiting.cancel()


NAN = torch.tensor([float("nan")])
IMPOSSIBLE = {
    "2 responses where 1": (sample(), sample()),
    "not finite": (replace(sample(), logprobs=NAN),),
    "beyond the vocabulary": (replace(sample(), token_ids=torch.tensor([10])),),
    "beyond the vocabulary of 10": (replace(sample(), token_ids=torch.tensor([-1])),),
    "was not suspended": (cut(7),),
    "2 log-probs to 1 tokens": (replace(sample(), logprobs=torch.zeros(2)),),
}


@pytest.mark.parametrize("reason", IMPOSSIBLE)
async def test_an_engine_that_answers_garbage_is_lost(reason: str) -> None:
    pool = pool_of(one := OpenEngine(), other := OpenEngine())
    (task,) = await asked(pool, 0)
    one.answer_with(*IMPOSSIBLE[reason])
    await settle()
    other.release()
    assert [s.token_ids.tolist() for s in await task] == [[1]]
    assert reason in pool.reasons[0]


async def test_an_engine_of_a_cancelled_request_goes_to_the_next() -> None:
    pool = pool_of(one := OpenEngine(), num_slots=1)
    first, before, after, last = await asked(pool, *range(4))
    before.cancel()  # while it waits
    await settle()
    one.release()
    while not first.done():
        await asyncio.sleep(0)
    after.cancel()  # it has the engine, and did not run since
    await settle()
    await answer_all(one)
    assert [task.cancelled() for task in (before, after)] == [True, True]
    assert last.done()


def test_the_cost_of_a_request_grows_with_nothing() -> None:
    few = num_calls(num_engines=4, num_requests=50)
    assert num_calls(num_engines=4, num_requests=1000) / 1000 < 2 * few / 50
    assert num_calls(num_engines=200, num_requests=1000) / 1000 < 2 * few / 50


def num_calls(*, num_engines: int, num_requests: int) -> int:
    """Calls of Python functions until a pool has answered all requests."""
    engines = [OpenEngine() for _ in range(num_engines)]
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    async def program() -> None:
        pool = pool_of(*engines)
        tasks = [ask(pool, context) for context in range(num_requests)]
        await asyncio.sleep(0)
        while not all(task.done() for task in tasks):
            sys.setprofile(None)
            busy = [engine for engine in engines if engine.open]
            sys.setprofile(note)
            for engine in busy:
                engine.release()
            for _ in range(6):
                await asyncio.sleep(0)

    sys.setprofile(note)
    try:
        asyncio.run(program())
    finally:
        sys.setprofile(None)
    return count


async def test_a_refusal_reaches_those_that_wait_behind_a_cancelled_one() -> None:
    queue = RequestQueue(num_slots=1)
    cancelled, waiting = [asyncio.ensure_future(queue.take(1)) for _ in range(2)]
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    queue.refuse(ServerDiedError("all are gone"))
    with pytest.raises(ServerDiedError, match="all are gone"):
        await waiting


async def test_a_queue_keeps_nothing_of_requests_that_ended() -> None:
    queue = RequestQueue(num_slots=4)
    members = [Member(index, OpenEngine(), 0) for index in range(2)]
    for member in members:
        queue.add(member)
    await queue.take(2)
    for _ in range(1000):
        queue.give_back(await queue.take(1), 1)
    assert sum(len(gc.get_referrers(member)) for member in members) < 50


# -- seconds without a request -------------------------------------------------------------------


class Idle(Pool):
    """A pool of one engine that is not ready yet, and its clock, which stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(OpenEngine())
        self.suspend(0)
        self.now_s = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def admit(self) -> None:
        self.join(0, self._members[0].handle, version=0)

    def idle_s(self) -> float:
        return self.take_metrics().get("time/engines_idle_s", Max(0.0)).value


def test_the_start_of_the_engines_is_not_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Idle(monkeypatch)
    pool.now_s += 50
    assert pool.idle_s() == 0
    pool.now_s += 50
    pool.admit()
    pool.now_s += 3
    assert pool.idle_s() == 3
    pool.now_s += 2
    pool.suspend(0)
    pool.admit()  # another update: the seconds before it count
    assert pool.idle_s() == 2


async def test_engines_are_idle_while_no_request_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests at a time the union counts."""
    pool = Idle(monkeypatch)
    pool.admit()
    gates = [asyncio.Event(), asyncio.Event()]

    async def answer(_: EngineHandle, request: SampleRequest) -> list[Sample]:
        await gates[int(request.token_ids[0])].wait()
        return [sample(0)]

    pool.ask = answer
    for number in range(3):
        for gate in gates:
            gate.clear()
        pool.now_s += 0.5
        tasks = await asked(pool, 0, 1)
        for gate, task in zip(gates, tasks, strict=True):
            pool.now_s += 4
            gate.set()
            await task
        pool.now_s += 0.25
        assert pool.idle_s() == 0.75, number
