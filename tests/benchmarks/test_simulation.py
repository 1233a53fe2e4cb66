"""The simulation of asynchronous training: hand computations, limits, conservation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, quantiles

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.sides.simulation import (
    Costs,
    DecodeCost,
    DrawLengths,
    HeavyTail,
    OnUpdate,
    SimulatedStep,
    Topology,
    simulate,
    summarize,
)

COSTS = Costs(
    decode=DecodeCost(fixed_s=1.0, per_response_s=0.5),
    num_slots=4,
    train_s_per_token=0.25,
    train_fixed_s=2.0,
    transfer_s=3.0,
    recompute_s_per_token=0.0,
)


def lengths_in_order(*groups: Sequence[int]) -> DrawLengths:
    remaining = iter(groups)
    return lambda _: next(remaining)


def own(num_ahead: int = 0, on_update: OnUpdate = "finish", *, num_engines: int = 1) -> Topology:
    return Topology(
        num_engines=num_engines,
        num_trainer_devices=2,
        max_staleness=num_ahead,
        num_ahead=num_ahead,
        on_update=on_update,
    )


def moments(steps: Sequence[SimulatedStep]) -> list[tuple[float, float]]:
    return [(one.trains_s, one.ended_s) for one in steps]


def test_a_synchronous_run_takes_the_seconds_of_a_hand_computation() -> None:
    draw = lengths_in_order([2, 4], [4, 6], [1, 1], [1, 1])
    steps = simulate(own(), COSTS, draw, num_prompts=2, num_steps=2)
    # Transfer 3 s. Then 2 decode steps of 4 responses, 2 of 3, 2 of 1: 2 * (3 + 2.5 + 1.5) s.
    # Training 16 tokens with two devices: 2 + 16 * 0.25 / 2 s.
    assert moments(steps) == [(17.0, 21.0), (27.0, 29.5)]
    assert [one.engines_busy_s for one in steps] == [14.0, 17.0]
    assert [one.groups for one in steps] == [[0, 1], [2, 3]]
    summary = summarize(steps, own(), num_first=1)
    assert summary.steps_per_hour == pytest.approx(3600 / 8.5)
    assert summary.trainer_idle == pytest.approx(1 - 2.5 / 8.5)
    assert summary.engines_idle == pytest.approx(1 - 3 / 8.5)


def test_interrupted_responses_keep_their_tokens_and_the_step_waits_for_those_due() -> None:
    draw = lengths_in_order([8], [14], [4])
    steps = simulate(own(1, "interrupt"), COSTS, draw, num_prompts=1, num_steps=3)
    # At 22 s group 1 has 10 of 14 tokens, and continues at 25 s beside group 2.
    assert moments(steps) == [(19.0, 22.0), (33.0, 36.75), (39.75, 42.25)]
    assert [one.staleness for one in steps] == [[0], [1], [1]]


def test_kept_tokens_cost_seconds_under_new_weights() -> None:
    costs = replace(COSTS, recompute_s_per_token=0.1)
    draw = lengths_in_order([8], [14], [4])
    steps = simulate(own(1, "interrupt"), costs, draw, num_prompts=1, num_steps=3)
    assert steps[1].trains_s == pytest.approx(34.0)


def test_finishing_responses_hold_up_the_transfer() -> None:
    draw = lengths_in_order([8], [14], [4])
    steps = simulate(own(1, "finish"), COSTS, draw, num_prompts=1, num_steps=3)
    # Group 1 ends at 28 s under the first weights, and the transfer follows.
    assert moments(steps) == [(19.0, 22.0), (31.0, 34.75), (40.0, 42.5)]


def test_both_sides_in_turns_take_as_long_as_with_devices_of_their_own() -> None:
    fused = Topology(num_engines=2, num_trainer_devices=2)
    draw = lengths_in_order([4], [6])
    (step,) = simulate(fused, COSTS, draw, num_prompts=2, num_steps=1)
    # One response on each engine: 6 decode steps of 1.5 s; then 10 tokens on both devices.
    assert (step.trains_s, step.ended_s) == (12.0, 15.25)
    summary = summarize([step], fused, num_first=0)
    assert summary.engines_idle == pytest.approx(1 - (6.0 + 9.0) / (2 * 15.25))


def test_a_group_waits_until_another_one_is_complete() -> None:
    draw = lengths_in_order([1, 5], [2, 3], [3, 3])
    costs = replace(COSTS, decode=DecodeCost(1.0, 0.0))
    (step,) = simulate(own(), costs, draw, num_prompts=3, num_steps=1)
    # Slots: 4. The second group gives back both of its slots after 3 decode steps, not one after 2.
    assert step.engines_busy_s == 3 + 3
    costs = replace(costs, num_slots=2)
    draw = lengths_in_order([1, 5], [2, 3], [1, 1])
    (step,) = simulate(own(), costs, draw, num_prompts=3, num_steps=1)
    assert step.engines_busy_s == 5 + 3 + 1


def test_a_group_that_waits_begins_with_the_new_weights() -> None:
    costs = replace(COSTS, num_slots=1)
    draw = lengths_in_order([8], [14], [4], [4])
    steps = simulate(own(2, "finish"), costs, draw, num_prompts=1, num_steps=4)
    # Group 2 waits for a slot while group 1 ends under the first weights, at 36 s.
    assert moments(steps)[:3] == [(15.0, 18.0), (39.0, 42.75), (48.0, 50.5)]
    assert [one.staleness for one in steps] == [[0], [1], [1], [1]]


def test_a_straggler_is_overtaken_until_its_step_has_come() -> None:
    topology = replace(own(1, "interrupt"), max_staleness=2)
    costs = replace(COSTS, decode=DecodeCost(1.0, 0.0))
    draw = lengths_in_order([100], *[[1]] * 4)
    steps = simulate(topology, costs, draw, num_prompts=1, num_steps=5)
    assert [one.groups for one in steps] == [[1], [2], [0], [3], [4]]
    assert [one.staleness for one in steps] == [[0], [0], [2], [1], [1]]


LENGTHS = HeavyTail(median_tokens=20, sigma=1.0, max_tokens=400, num_responses=3)


@settings(max_examples=60)
@given(
    num_engines=st.integers(1, 4),
    num_slots=st.integers(1, 8),
    num_prompts=st.integers(1, 5),
    num_ahead=st.integers(0, 3),
    slack=st.integers(0, 2),
    on_update=st.sampled_from(["finish", "interrupt"]),
    train_s_per_token=st.sampled_from([0.0, 0.1, 2.0]),
    seed=st.integers(0, 1000),
)
@example(  # two groups that must be trained at the same step, the older one last
    num_engines=3,
    num_slots=1,
    num_prompts=1,
    num_ahead=2,
    slack=0,
    on_update="interrupt",
    train_s_per_token=0.0,
    seed=97,
)
def test_every_group_is_trained_once_and_in_time(
    *,
    num_engines: int,
    num_slots: int,
    num_prompts: int,
    num_ahead: int,
    slack: int,
    on_update: OnUpdate,
    train_s_per_token: float,
    seed: int,
) -> None:
    topology = replace(
        own(num_ahead, on_update, num_engines=num_engines), max_staleness=num_ahead + slack
    )
    costs = replace(
        COSTS,
        num_slots=num_slots,
        train_s_per_token=train_s_per_token,
        recompute_s_per_token=0.01,
    )
    steps = simulate(topology, costs, LENGTHS, num_prompts=num_prompts, num_steps=7, seed=seed)
    trained = [index for step in steps for index in step.groups]
    assert sorted(trained) == list(range(7 * num_prompts))
    assert all(len(step.groups) == num_prompts for step in steps)
    assert all(len(step.staleness) == 3 * num_prompts for step in steps)
    assert all(0 <= one <= num_ahead + slack for step in steps for one in step.staleness)
    ends = [moment for step in steps for moment in (step.began_s, step.trains_s, step.ended_s)]
    assert ends == sorted(ends)
    assert steps[-1].engines_busy_s <= num_engines * steps[-1].ended_s
    again = simulate(topology, costs, LENGTHS, num_prompts=num_prompts, num_steps=7, seed=seed)
    assert again == steps


@pytest.mark.parametrize("on_update", ["finish", "interrupt"])
def test_with_fast_engines_the_trainer_sets_the_rate(on_update: OnUpdate) -> None:
    costs = replace(COSTS, decode=DecodeCost(1e-6, 0.0), num_slots=64)
    topology, draw = own(1, on_update), lambda _: [10] * 4
    steps = simulate(topology, costs, draw, num_prompts=2, num_steps=8)
    summary = summarize(steps, topology, num_first=2)
    # A step: 3 s of transfer, and 80 tokens on two devices.
    assert summary.steps_per_hour == pytest.approx(3600 / (3 + 2 + 80 * 0.25 / 2), rel=1e-3)
    assert summary.trainer_idle == pytest.approx(3 / 15, rel=1e-3)


def test_with_a_fast_trainer_the_engines_set_the_rate() -> None:
    costs = replace(COSTS, train_s_per_token=1e-6, train_fixed_s=0.0, transfer_s=0.0)
    topology, draw = own(4, "interrupt", num_engines=3), lambda _: [10]
    steps = simulate(topology, costs, draw, num_prompts=12, num_steps=20)
    summary = summarize(steps, topology, num_first=2)
    # Four responses on each engine: a token of each in 3 s.
    assert summary.steps_per_hour == pytest.approx(3600 / (12 * 10 * 3 / (3 * 4)), rel=1e-3)
    assert summary.engines_idle == pytest.approx(0.0, abs=1e-3)


def test_lengths_have_the_tail_that_they_name() -> None:
    draw = HeavyTail(median_tokens=1000, sigma=1.0, max_tokens=32_000, num_responses=8)
    source = random.Random(1)
    groups = [draw(source) for _ in range(4000)]
    percents = quantiles((one for group in groups for one in group), n=100)
    assert percents[49] == pytest.approx(1000, rel=0.05)
    assert percents[98] == pytest.approx(1000 * 10.2, rel=0.1)
    assert max(max(group) for group in groups) == 32_000
    spread = fmean(max(group) / min(group) for group in groups)
    alone = replace(draw, prompt_share=1.0)
    assert all(max(group) == min(group) for group in [alone(source) for _ in range(9)])
    assert spread > 3


def test_a_summary_without_steps_is_refused() -> None:
    steps = simulate(own(1), COSTS, LENGTHS, num_prompts=1, num_steps=2)
    with pytest.raises(ValueError, match="2 steps: none is left without the first 1"):
        summarize(steps, own(1), num_first=1)
