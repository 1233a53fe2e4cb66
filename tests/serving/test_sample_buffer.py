"""The buffer of an asynchronous run: no group too old, none lost, and no wait without an end."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import PhaseError
from hybridrl.sampler import Sample
from hybridrl.serving.background import SampleBuffer

SAMPLES = [Sample(torch.tensor([1]), torch.zeros(1), "stop", 0)]


@pytest.mark.parametrize("extra_batches", [0, 2])
@given(
    num_prompts=st.integers(1, 4),
    max_staleness=st.integers(1, 4),
    num_steps=st.integers(1, 12),
    random=st.randoms(use_true_random=False),
)
def test_no_group_is_older_than_the_bound_or_waits_for_others(
    extra_batches: int, num_prompts: int, max_staleness: int, num_steps: int, random: Random
) -> None:
    buffer = SampleBuffer(num_prompts=num_prompts, max_staleness=max_staleness)
    admitted: list[int] = []
    """By prompt: the step."""
    unfinished: list[int] = []
    taken: set[int] = set()
    for step in range(num_steps):
        for _ in range(1 + random.randint(0, extra_batches)):  # more than one with a group filter
            level = (min(max_staleness, num_steps - 1 - step) + 1) * num_prompts
            new = range(len(admitted), len(admitted) + max(0, level - buffer.num_open))
            buffer.admit(new, step=step)
            unfinished += new
            admitted += [step] * len(new)
            while (batch := buffer.take(step=step)) is None:
                is_open = [index for index in range(len(admitted)) if index not in taken]
                assert set(is_open[:num_prompts]) & set(unfinished)  # else it waits for ever
                index = random.choice(unfinished)
                unfinished.remove(index)
                buffer.complete(index, SAMPLES)
            assert len(batch) == num_prompts
            assert list(batch) == sorted(batch)  # oldest first
            assert taken.isdisjoint(batch)
            taken |= batch.keys()
            assert all(step - admitted[index] <= max_staleness for index in batch)
    assert buffer.num_open == 0
    assert taken == set(range(len(admitted)))


def test_a_young_group_may_overtake_one_that_still_has_its_turn() -> None:
    buffer = SampleBuffer(num_prompts=1, max_staleness=2)
    buffer.admit([0, 1, 2], step=0)
    buffer.complete(2, SAMPLES)
    assert buffer.take(step=0) == {2: tuple(SAMPLES)}
    buffer.admit([3], step=1)
    buffer.complete(3, SAMPLES)
    assert buffer.take(step=1) is None  # 0 and 1 are both due by step 2
    buffer.complete(1, SAMPLES)
    assert buffer.take(step=1) == {1: tuple(SAMPLES)}
    assert (buffer.num_open, buffer.num_complete) == (2, 1)


def test_what_could_not_be_learned_from_in_time_is_never_started() -> None:
    buffer = SampleBuffer(num_prompts=2, max_staleness=1)
    buffer.admit([0, 1, 2], step=0)
    with pytest.raises(PhaseError, match="at most 4 may be open"):
        buffer.admit([3, 4], step=0)
    with pytest.raises(PhaseError, match="prompt 2 was admitted twice"):
        buffer.admit([2], step=0)
    buffer.complete(0, SAMPLES)
    for index in (0, 7):
        with pytest.raises(PhaseError, match=f"group of prompt {index} is not open"):
            buffer.complete(index, SAMPLES)
