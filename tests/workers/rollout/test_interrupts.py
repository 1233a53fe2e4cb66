from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.metrics import Sum
from hybridrl.sampler import RequestParams, Sample, Sampler, SampleRequest, join_parts, request_key
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.request_listener import RequestProgram
from hybridrl.workers.rollout.single_turn import OpenResponses, single_turn
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import (
    assert_samples,
    make_prompts,
    ready_engine,
    sampling_params,
    stop,
)
from tests.workers.rollout.test_programs import PARAMS, context, rest

NUM_RESPONSES = 3
LONG = RequestParams(max_new_tokens=20, temperature=1.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFRolloutEngine:
    return ready_engine(make_tiny_model(tmp_path_factory.mktemp("model")), num_slots=4)


def params_of(number: int) -> RequestParams:
    return replace(PARAMS[number % len(PARAMS)], max_new_tokens=3 + 5 * (number % 3))


async def finish(sampler: Sampler, number: int, key: int, begun: Sample) -> Sample:
    """Ask for the tokens that an interrupted response lacks."""
    tokens = [*context(number), *begun.token_ids.tolist()]
    params = params_of(number)
    left = replace(params, max_new_tokens=params.max_new_tokens - len(begun.token_ids))
    return join_parts(begun, await sampler.sample(tokens, left, key=key))


def keys_of(number: int) -> list[int]:
    return [request_key(number, sibling) for sibling in range(NUM_RESPONSES)]


async def sample_all(sampler: Sampler) -> list[list[Sample]]:
    work = [sampler.sample_group(context(n), params_of(n), keys=keys_of(n)) for n in range(6)]
    return await asyncio.gather(*work)


@pytest.fixture(scope="module")
def uncut(engine: HFRolloutEngine) -> list[list[Sample]]:
    return engine.run(sample_all)


async def interrupt_after(sampler: Sampler, engine: HFRolloutEngine, num_steps: int) -> None:
    """Interrupt the engine when another response has got so many tokens."""
    if num_steps:
        await sampler.sample([1, 2, 3], replace(LONG, max_new_tokens=num_steps), key=99)
    engine.interrupt()


async def sample_until(sampler: Sampler, engine: HFRolloutEngine, step: int) -> list[list[Sample]]:
    interrupting = asyncio.ensure_future(interrupt_after(sampler, engine, step))
    groups = await sample_all(sampler)
    await interrupting
    return groups


async def continue_until(
    sampler: Sampler, *, engine: HFRolloutEngine, parts: list[list[Sample]], moment: int | None
) -> list[list[Sample]]:
    work = [
        finish(sampler, number, key, part)
        for number, group in enumerate(parts)
        for key, part in zip(keys_of(number), group, strict=True)
        if part.is_interrupted
    ]
    tasks = [asyncio.ensure_future(each) for each in work]
    if moment is not None:
        await interrupt_after(sampler, engine, moment)
    ended = iter(await asyncio.gather(*tasks))
    return [[next(ended) if p.is_interrupted else p for p in group] for group in parts]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 24), min_size=1, max_size=3))
def test_interrupted_responses_continue_as_if_uncut(
    engine: HFRolloutEngine, uncut: list[list[Sample]], moments: list[int]
) -> None:
    parts = engine.run(lambda sampler: sample_until(sampler, engine, moments[0]))
    for moment in [*moments[1:], None]:
        engine.continue_generation()
        parts = engine.run(partial(continue_until, engine=engine, parts=parts, moment=moment))
    for group, expected in zip(parts, uncut, strict=True):
        assert_samples(group, expected)
        for response, alone in zip(group, expected, strict=True):
            assert response.versions_L.tolist() == alone.versions_L.tolist()
            assert response.weight_versions is None
    assert [len(group) for group in parts] == [NUM_RESPONSES] * 6


def test_an_interrupt_ends_responses_at_their_token(engine: HFRolloutEngine) -> None:
    """Of four slots one group has three; one sibling of the next gets the fourth at step 5."""

    async def program(sampler: Sampler) -> list[list[Sample]]:
        short, limit = replace(LONG, max_new_tokens=4), replace(LONG, max_new_tokens=6)
        work = [
            sampler.sample_group(context(5), short, keys=(1,)),
            sampler.sample_group(context(0), limit, keys=keys_of(0)),
            *(sampler.sample_group(context(n), LONG, keys=keys_of(n)) for n in (1, 2)),
        ]
        tasks = [asyncio.ensure_future(each) for each in work]
        await tasks[1]
        engine.interrupt()
        late = await sampler.sample_group(context(4), LONG, keys=keys_of(4))
        return [*await asyncio.gather(*tasks), late]

    engine.continue_generation()
    groups = engine.run(program)
    engine.continue_generation()
    lengths = [[len(sample.token_ids) for sample in group] for group in groups]
    assert lengths == [[4], [6, 6, 6], [2, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert [[len(sample.logprobs) for sample in group] for group in groups] == lengths
    is_cut = [{sample.is_interrupted for sample in group} for group in groups]
    assert is_cut == [{False}, {False}, {True}, {True}, {True}]


def test_slots_are_free_after_an_interrupt(engine: HFRolloutEngine) -> None:
    async def program(sampler: Sampler) -> list[Sample]:
        await sample_until(sampler, engine, 5)
        engine.continue_generation()
        return await sampler.sample_group(context(1), params_of(1), keys=keys_of(1))

    uncut = engine.run(lambda s: s.sample_group(context(1), params_of(1), keys=keys_of(1)))
    assert_samples(engine.run(program), uncut)


def asked(number: int) -> SampleRequest:
    return SampleRequest(torch.tensor(context(number)), LONG, keys_of(number))


def test_requests_of_threads_are_interrupted_and_served_again(tiny_model: Path) -> None:
    engine = ready_engine(tiny_model, num_slots=2)
    server = RequestProgram(engine)
    server.open()
    answers = [server.answer(asked(n)) for n in range(8)]
    assert answers[0].result(60)
    engine.interrupt()
    parts = [answer.result(60) for answer in answers]
    assert any(sample.is_interrupted for group in parts for sample in group)
    late = server.answer(asked(0)).result(60)
    assert [sample.is_interrupted for sample in late] == [True] * NUM_RESPONSES
    server.close()
    rest(engine)
    server.open()
    assert_samples(server.answer(asked(0)).result(60), parts[0])
    server.close()


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)


def part_of(number: int, size: int, version: int, *, context_tokens: int, ends: bool) -> Sample:
    base = 100 * (number + 1)
    num_inputs = context_tokens + size - 1
    return Sample(
        torch.arange(base, base + size),
        -torch.arange(base, base + size).float(),
        "stop" if ends else "interrupted",
        version,
        routed_experts_LJK=torch.full((num_inputs, 1, 1), number),
    )


@given(SIZES, st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_joining_is_associative_and_keeps_every_token(sizes: list[int], steps: list[int]) -> None:
    parts, begin, version = [], 2, 5
    for number, size in enumerate(sizes):
        ends = number == len(sizes) - 1
        version += steps[number]
        parts.append(part_of(number, size, version, context_tokens=begin, ends=ends))
        begin += size
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = join_parts(one_by_one, part)
    from_the_end = parts[-1]
    for part in reversed(parts[:-1]):
        from_the_end = join_parts(part, from_the_end)
    with pytest.raises(ValueError, match="ended with stop has no further tokens"):
        join_parts(parts[-1], parts[-1])
    for joined in (one_by_one, from_the_end):
        assert joined.token_ids.tolist() == [t for p in parts for t in p.token_ids.tolist()]
        assert joined.logprobs.tolist() == [t for p in parts for t in p.logprobs.tolist()]
        expected = [p.weight_version for p in parts for _ in p.token_ids]
        assert joined.versions_L.tolist() == expected
        assert (joined.weight_versions is None) == (len(set(expected)) <= 1)
        assert joined.weight_version == (expected or [parts[-1].weight_version])[0]
        assert joined.finish_reason == "stop"
        experts = joined.routed_experts_LJK
        assert experts is not None
        assert len(experts) == 2 + len(expected) - 1
        by_part = [n for n, p in enumerate(parts) for _ in p.token_ids]
        # The last token of a part is first an input of the next one.
        assert experts[2:, 0, 0].tolist() == by_part[1:]


# Phases that end when enough prompts are complete; the others continue in the next one.

NUM_PROMPTS = 8
GROUP = 2
PROMPTS = make_prompts([2 + place % 5 for place in range(NUM_PROMPTS)])
SAMPLING = sampling_params(group=GROUP, tokens=20, stop=tuple(range(6)))


@pytest.fixture(scope="module")
def whole(engine: HFRolloutEngine) -> list[Sample]:
    return engine.run(single_turn(PROMPTS, SAMPLING))


def phase(
    engine: HFRolloutEngine, responses: OpenResponses, indices: Sequence[int], enough: int
) -> Answered:
    """As a worker's phase: the weights stay, though their version rises."""
    sampling = replace(SAMPLING, num_complete=enough)
    program = responses.program(PROMPTS[list(indices)], sampling, interrupt=engine.interrupt)
    answered = engine.run(program)
    stop(engine)
    engine.finish_update(version=engine.version + 1)
    engine.continue_generation()
    return answered


def index_of(answered: Answered) -> list[int]:
    index_P: list[int] = answered.prompts.prompt_index_P.tolist()
    return index_P


@settings(max_examples=15)
@given(num_open=st.integers(3, 5), enough=st.integers(1, 2))
def test_prompts_over_phases_get_what_they_get_in_one(
    engine: HFRolloutEngine, whole: list[Sample], num_open: int, enough: int
) -> None:
    responses, waiting = OpenResponses(), list(range(NUM_PROMPTS))
    is_open: list[int] = []
    phases = []
    while waiting or is_open:
        is_open += [waiting.pop(0) for _ in range(min(num_open - len(is_open), len(waiting)))]
        first = engine.version
        answered = phase(engine, responses, is_open, min(enough, len(is_open)))
        chosen = index_of(answered)
        assert len(chosen) == min(enough, len(is_open))
        assert chosen == sorted(chosen)
        is_open = [index for index in is_open if index not in chosen]
        assert responses.metrics()["rollout/open_prompts"] == Sum(len(is_open))
        for number, index in enumerate(chosen):
            for sibling in range(GROUP):
                sample = answered.samples[number * GROUP + sibling]
                assert_samples([sample], [whole[index * GROUP + sibling]])
                versions = sample.versions_L.tolist()
                assert versions == sorted(versions)
                assert versions[-1] <= first
                phases.append(len(set(versions)))
    assert max(phases) > 1


def test_a_phase_ends_with_the_last_group_that_it_needs(
    engine: HFRolloutEngine, whole: list[Sample]
) -> None:
    lengths = [len(sample.token_ids) for sample in whole]
    ends = [max(lengths[i : i + GROUP]) for i in range(0, len(lengths), GROUP)]
    wide = [0, 1]
    responses = OpenResponses()
    answered = phase(engine, responses, wide, 1)
    soonest = min(wide, key=lambda index: ends[index])
    assert index_of(answered) == [soonest]
    (other,) = set(wide) - {soonest}
    expected = [min(lengths[other * GROUP + s], ends[soonest]) for s in range(GROUP)]
    cut = [n for s, n in enumerate(expected) if n < lengths[other * GROUP + s]]
    metrics = responses.metrics()
    assert metrics["rollout/interrupted_responses"] == Sum(len(cut))
    assert metrics["rollout/interrupted_tokens"] == Sum(sum(cut))
    assert ends[other] > ends[soonest]


def test_complete_prompts_beyond_enough_come_first_in_the_next_phase(
    engine: HFRolloutEngine,
) -> None:
    short = replace(SAMPLING, max_response_tokens=1, num_complete=1)
    responses, order = OpenResponses(), []
    for first in range(4):
        program = responses.program(
            PROMPTS[list(range(first, 4))], short, interrupt=engine.interrupt
        )
        answered = engine.run(program)
        order += index_of(answered)
        assert [len(sample.token_ids) for sample in answered.samples] == [1] * GROUP
        engine.continue_generation()
    assert order == [0, 1, 2, 3]


def test_responses_to_prompts_that_are_gone_are_forgotten(engine: HFRolloutEngine) -> None:
    responses = OpenResponses()
    phase(engine, responses, [0, 1, 2], 1)
    phase(engine, responses, [5, 6], 1)
    assert responses.metrics()["rollout/open_prompts"] == Sum(1)
