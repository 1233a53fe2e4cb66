from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError, RequestError
from hybridrl.sampler import Program, RequestParams, Sample, Sampler, SampleRequest, T, request_key
from hybridrl.workers.rollout.embedded import prefill
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.event_loop import ProgramCall, RequestGate, run_program
from hybridrl.workers.rollout.protocol import RolloutEngine
from hybridrl.workers.rollout.request_listener import RequestProgram
from hybridrl.workers.rollout.single_turn import single_turn
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import (
    VOCAB_SIZE,
    assert_samples,
    make_prompts,
    ready_engine,
    sampling_params,
    send_weights,
    stop,
    tokens_of,
)

PARAMS = (
    RequestParams(max_new_tokens=6, temperature=1.0),
    RequestParams(max_new_tokens=9, temperature=0.7, top_p=0.9, stop_token_ids=(3, 5)),
    RequestParams(max_new_tokens=4, temperature=1.0, top_k=5, stop_token_ids=(7,)),
    RequestParams(max_new_tokens=7, temperature=0.0),
)


def context(number: int) -> list[int]:
    return [(7 * number + step) % VOCAB_SIZE for step in range(2 + number % 9)]


def sample_alone(engine: HFRolloutEngine, number: int) -> Sample:
    async def program(sampler: Sampler) -> Sample:
        params = PARAMS[number % len(PARAMS)]
        return await sampler.sample(context(number), params, key=request_key(number, 0))

    return engine.run(program)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFRolloutEngine:
    return ready_engine(make_tiny_model(tmp_path_factory.mktemp("model")), num_slots=3)


@pytest.fixture(scope="module")
def alone(engine: HFRolloutEngine) -> list[Sample]:
    return [sample_alone(engine, number) for number in range(12)]


class Actions:
    """What random programs do, one after another; afterwards every slot must be free."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._tasks: dict[int, asyncio.Task[Sample]] = {}
        self.cancelled: set[int] = set()

    async def do(self, action: tuple[str, int]) -> None:
        verb, number = action
        if verb == "ask" and number not in self._tasks:
            params = PARAMS[number % len(PARAMS)]
            work = self._sampler.sample(context(number), params, key=request_key(number, 0))
            self._tasks[number] = asyncio.ensure_future(work)
        elif verb == "cancel" and number in self._tasks:
            if self._tasks[number].cancel():  # also True if it was asked to before
                self.cancelled.add(number)
        elif verb == "await" and number in self._tasks:
            await asyncio.wait([self._tasks[number]])
        else:
            await asyncio.sleep(0.0001 * number)  # some decode steps

    async def results(self) -> dict[int, Sample]:
        samples = {}
        for number, task in self._tasks.items():
            with suppress(asyncio.CancelledError):
                samples[number] = await task
        return samples


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "ask", "await", "cancel", "wait"]), st.integers(0, 11)),
        max_size=25,
    )
)
def test_requests_that_join_and_leave_get_what_they_get_alone(
    engine: HFRolloutEngine, alone: list[Sample], actions: Sequence[tuple[str, int]]
) -> None:
    async def program(sampler: Sampler) -> tuple[dict[int, Sample], int]:
        todo = Actions(sampler)
        for action in actions:
            await todo.do(action)
        return await todo.results(), len(todo.cancelled)

    samples, num_cancelled = engine.run(program)
    assert len(samples) == len({n for verb, n in actions if verb == "ask"}) - num_cancelled
    assert_samples([*samples.values()], [alone[number] for number in samples])
    assert_samples([sample_alone(engine, 5)], [alone[5]])


async def converse(sampler: Sampler, sibling: int, *, num_turns: int) -> list[Sample]:
    """Turns of which each context begins with the one before, and its response."""
    tokens, samples = context(3), []
    for turn in range(num_turns):
        params = RequestParams(max_new_tokens=4 + sibling % 3, temperature=1.0)
        key = request_key(11, sibling, turn=turn)
        samples.append(await sampler.sample(tokens, params, key=key))
        tokens += [*samples[-1].token_ids.tolist(), 1 + turn, 2]
    return samples


@pytest.mark.parametrize("window", [None, 8])
def test_a_later_turn_reads_the_cache_of_the_one_before(window: int | None, tmp_path: Path) -> None:
    if window is None:
        folder = make_tiny_model(tmp_path)
    else:
        folder = make_tiny_model(tmp_path, "mistral", sliding_window=window)
    many = ready_engine(folder, num_slots=8, max_context_tokens=64)

    async def program(sampler: Sampler) -> list[list[Sample]]:
        work = [converse(sampler, sibling, num_turns=4) for sibling in range(6)]
        return await asyncio.gather(*work)

    conversations = many.run(program)
    stats = many.last_stats
    assert stats is not None
    # Six equal first contexts run once, and of each later turn its new tokens alone: the last
    # sampled one, and two more.
    assert stats.num_prefill_tokens == len(context(3)) + 6 * 3 * 3
    again = many.run(program)
    few = ready_engine(folder, num_slots=1, max_context_tokens=64)
    apart = few.run(program)
    for one, repeated, other in zip(conversations, again, apart, strict=True):
        assert [each.logprobs.tolist() for each in one] == [
            each.logprobs.tolist() for each in repeated
        ]
        assert_samples(one, other)


def test_a_waiting_conversation_keeps_its_cache_as_slots_are_free(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=3, max_context_tokens=64)
    params = RequestParams(max_new_tokens=5, temperature=1.0)

    async def program(sampler: Sampler) -> list[Sample]:
        first = await sampler.sample(context(3), params, key=1)
        others = [sampler.sample(context(8), params, key=key) for key in (2, 3)]
        await asyncio.gather(*others)  # in the slot of the first, and in the next one
        return [first, await sampler.sample([*context(3), *first.token_ids, 1, 2], params, key=4)]

    _, later = engine.run(program)
    assert engine.last_stats is not None
    assert engine.last_stats.num_prefill_tokens == len(context(3)) + len(context(8)) + 3
    alone = ready_engine(tiny_model, num_slots=1, max_context_tokens=64)
    assert_samples([later], alone.run(program)[1:])


def test_requests_of_successive_steps_share_a_prefill_pass(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=8, max_context_tokens=64)
    other = RequestParams(max_new_tokens=12, temperature=1.0)

    async def program(sampler: Sampler) -> list[Sample]:
        async def two_turns(sibling: int) -> Sample:
            await sampler.sample(context(5), replace(other, max_new_tokens=sibling), key=sibling)
            return await sampler.sample(context(sibling), other, key=10 + sibling)

        return await asyncio.gather(*(two_turns(sibling) for sibling in (1, 2, 3, 12)))

    samples = engine.run(program)
    assert engine.last_stats is not None
    assert engine.last_stats.num_prefill_passes == 3  # of all, of three, and of the last one
    alone = ready_engine(tiny_model, num_slots=1, max_context_tokens=64)
    assert_samples(samples, alone.run(program))


def test_equal_programs_are_bitwise_equal_across_weight_updates(tmp_path: Path) -> None:
    folders = [make_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    engine = ready_engine(folders[0], num_slots=4, max_context_tokens=64)

    async def program(sampler: Sampler) -> list[Tensor]:
        talks = [converse(sampler, sibling, num_turns=3) for sibling in range(5)]
        others = single_turn(make_prompts((3, 8)), sampling_params(stop=(5,)))(sampler)
        *found, alone = await asyncio.gather(*talks, others)
        return [sample.logprobs for samples in [*found, alone] for sample in samples]

    cycles = []
    for folder in (*folders, *folders):
        send_weights(engine, folder)
        cycles.append([logprobs.tolist() for logprobs in engine.run(program)])
    assert cycles[:2] == cycles[2:]
    assert cycles[0] != cycles[1]


def test_a_cancelled_request_frees_its_slots_and_its_place(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=3, max_context_tokens=128)
    long, short = replace(PARAMS[0], max_new_tokens=120), replace(PARAMS[0], max_new_tokens=3)

    async def program(sampler: Sampler) -> list[Sample]:
        running = asyncio.ensure_future(sampler.sample_group([1, 2], long, keys=(1, 2)))
        ended = asyncio.ensure_future(sampler.sample([5], short, key=3))
        waiting = asyncio.ensure_future(sampler.sample([6], long, key=4))
        await ended
        running.cancel()
        waiting.cancel()
        return await sampler.sample_group([1, 2], short, keys=(1, 2, 5))

    for _ in range(2):
        assert [len(sample.token_ids) for sample in engine.run(program)] == [3, 3, 3]
        assert engine.last_stats is not None
        assert engine.last_stats.num_decode_steps == 3 + 3


def test_an_error_of_the_program_ends_it_and_leaves_the_engine_clean(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model)
    expected = tokens_of(engine.run(single_turn(make_prompts((4, 9)), sampling_params())))

    async def fails(sampler: Sampler) -> None:
        left = asyncio.ensure_future(sampler.sample([1, 2], PARAMS[0], key=1))
        await sampler.sample([3], PARAMS[2], key=2)
        assert not left.done()
        raise ZeroDivisionError

    async def refused(sampler: Sampler) -> int:
        for bad in ([], [VOCAB_SIZE], [1] * 32):
            with pytest.raises(RequestError):
                await sampler.sample(bad, PARAMS[0], key=1)
        return len((await sampler.sample([1], PARAMS[0], key=1)).token_ids)

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.run(fails)
        assert engine.run(refused) == 6
        again = engine.run(single_turn(make_prompts((4, 9)), sampling_params()))
        assert tokens_of(again) == expected


@pytest.mark.shows("2.9")
def test_a_drain_ends_a_program_that_waits_for_something_else(tiny_model: Path) -> None:
    engine, waits = ready_engine(tiny_model), Event()

    async def stubborn(sampler: Sampler) -> list[Sample]:
        with suppress(asyncio.CancelledError):
            waits.set()
            await asyncio.sleep(600.0)  # as for a tool
        with pytest.raises(EngineError, match="aborted 0 of 0 requests"):
            await sampler.sample([1], PARAMS[0], key=1)
        return []

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.run, stubborn)
        assert waits.wait(60.0)
        engine.pause()
        assert engine.drain(timeout_s=0.0) == 0
        with pytest.raises(EngineError, match="the engine was drained before they ended"):
            call.result(60.0)
    engine.continue_generation()
    assert engine.run(single_turn(make_prompts((4,)), sampling_params()))


def test_equal_contexts_share_a_row_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_MAX_PASS_TOKENS", 8)
    assert prefill.plan_pass([(b"a", 4), (b"b", 3), (b"a", 4), (b"c", 1), (b"b", 3)]) == [0, 1, 0]
    assert prefill.plan_pass([(b"long", 99), (b"long", 99), (b"b", 1)]) == [0, 0]


SHORT = RequestParams(max_new_tokens=6, temperature=1.0)


def request(server: RequestProgram, number: int) -> Future[list[Sample]]:
    keys = (request_key(number, 0),)
    return server.answer(SampleRequest(torch.tensor(context(number)), SHORT, keys))


def opened(folder: Path) -> tuple[HFRolloutEngine, RequestProgram]:
    engine = ready_engine(folder, num_slots=4)
    server = RequestProgram(engine)
    server.open()
    return engine, server


def rest(engine: HFRolloutEngine) -> None:
    assert stop(engine) == 0
    engine.continue_generation()


@pytest.mark.shows("2.11")
def test_a_closed_server_ends_its_requests_and_refuses_others(tiny_model: Path) -> None:
    engine, server = opened(tiny_model)
    answers = [request(server, number) for number in range(6)]
    assert not answers[5].cancel()  # a caller that goes away does not hold the program
    server.close()
    with pytest.raises(PhaseError, match="a request was refused: the engine is paused"):
        request(server, 6)
    rest(engine)
    assert all(len(answer.result(0)) == 1 for answer in answers)
    server.open()
    answer = request(server, 7)
    server.close()
    server.open()  # before it ended
    assert len(request(server, 2).result(60)) == len(answer.result(60)) == 1
    server.close()


def test_the_loop_turns_before_while_and_after_it_is_open(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=4)
    server = RequestProgram(engine)
    server.turn().result(0)
    server.open()
    answer = request(server, 1)
    server.turn().result(60)
    server.close()
    rest(engine)
    assert len(answer.result(0)) == 1
    server.turn().result(60)


class StuckEngine:
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

    async def answer(self, request: SampleRequest) -> list[Sample]:
        with self._call.request(len(request.keys)):
            self._is_busy.set()
            await asyncio.Event().wait()
        return []


@pytest.mark.shows("2.9")
def test_a_drain_at_its_deadline_ends_open_requests_with_an_error() -> None:
    engine = StuckEngine()
    server = RequestProgram(cast(RolloutEngine, engine))
    server.open()
    answer = server.answer(SampleRequest(torch.tensor([1, 2]), SHORT, (1, 2)))
    assert engine.is_busy.wait(60)
    server.close()
    engine.gate.pause()
    assert engine.gate.drain(0.0) == 2
    with pytest.raises(EngineError, match="a request got no answer: EngineError: aborted 2 of 2"):
        answer.result(60)


class DyingEngine(StuckEngine):
    """Its program has failed, and the thread that ran it comes back late."""

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
    answer = server.answer(SampleRequest(torch.tensor([1, 2]), SHORT, (1,)))
    assert engine.is_busy.wait(60)
    engine.gate.drain(0.0)
    assert engine.has_failed.wait(60)
    with pytest.raises(PhaseError, match="a request was refused"):
        server.answer(SampleRequest(torch.tensor([1, 2]), SHORT, (2,)))
    server.turn().result(0)
    server.close()
    engine.may_return.set()
    with pytest.raises(EngineError, match="a request got no answer"):
        answer.result(60)


def test_a_request_or_an_opening_that_is_refused_says_so(tiny_model: Path) -> None:
    engine, server = opened(tiny_model)
    wrong = server.answer(SampleRequest(torch.tensor([], dtype=torch.int64), SHORT, (1,)))
    with pytest.raises(RequestError, match="is empty"):
        wrong.result(60)
    assert len(request(server, 1).result(60)) == 1  # the others go on
    server.close()
    assert stop(engine) == 0
    with pytest.raises(PhaseError, match="the engine is paused"):
        RequestProgram(engine).open()
