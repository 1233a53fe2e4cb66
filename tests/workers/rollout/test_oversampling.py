"""Phases that end when enough prompts are complete; the others continue in the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.metrics import Sum
from hybridrl.sampler import Sample
from hybridrl.workers.rollout.assemble import Answered
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.single_turn import OpenResponses, single_turn
from tests.tiny_models import make_tiny_model
from tests.workers.rollout.engines import make_prompts, ready_engine, sampling_params
from tests.workers.rollout.test_programs import require_equal

NUM_PROMPTS = 8
GROUP = 2
PROMPTS = make_prompts([2 + place % 5 for place in range(NUM_PROMPTS)])
SAMPLING = sampling_params(group=GROUP, tokens=20, stop=tuple(range(6)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> HFRolloutEngine:
    return ready_engine(make_tiny_model(tmp_path_factory.mktemp("model")), num_slots=5)


@pytest.fixture(scope="module")
def uncut(engine: HFRolloutEngine) -> list[Sample]:
    return engine.run(single_turn(PROMPTS, SAMPLING))


def phase(
    engine: HFRolloutEngine, responses: OpenResponses, indices: Sequence[int], enough: int
) -> Answered:
    """Go on with these prompts, and let the engine rest and take weights, as a phase does."""
    sampling = replace(SAMPLING, num_complete=enough)
    program = responses.program(PROMPTS[list(indices)], sampling, interrupt=engine.interrupt)
    answered = engine.run(program)
    engine.pause()
    engine.drain(timeout_s=1.0)
    engine.finish_update(version=engine.version + 1)
    engine.continue_generation()
    return answered


def index_of(answered: Answered) -> list[int]:
    index_P: list[int] = answered.prompts.prompt_index_P.tolist()
    return index_P


@settings(max_examples=15)
@given(num_open=st.integers(3, 5), enough=st.integers(1, 2))
def test_prompts_over_phases_get_what_they_get_in_one(
    engine: HFRolloutEngine, uncut: list[Sample], num_open: int, enough: int
) -> None:
    """The weights are the same in all phases, though their version rises."""
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
                require_equal(sample, uncut[index * GROUP + sibling])
                versions = sample.versions_L.tolist()
                assert versions == sorted(versions)
                assert versions[-1] <= first
                phases.append(len(set(versions)))
    assert max(phases) > 1


def test_a_phase_ends_with_the_last_group_that_it_needs(
    engine: HFRolloutEngine, uncut: list[Sample]
) -> None:
    """No response has more tokens than the longest of the groups that were waited for."""
    lengths = [len(sample.token_ids) for sample in uncut]
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
    """Equal prompts with a limit of one token end in the same step."""
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
    """A run that resumes may give its prompts to other ranks."""
    responses = OpenResponses()
    phase(engine, responses, [0, 1, 2], 1)
    phase(engine, responses, [5, 6], 1)
    assert responses.metrics()["rollout/open_prompts"] == Sum(1)
