from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any, cast

import pytest
import torch

from hybridrl.batch import row_lengths
from hybridrl.errors import DispatchError, TrainingError
from hybridrl.metrics import Mean, Metrics, Sum, check_declared
from hybridrl.trainer.build_algorithm import Ingredients, build_policy_optimization
from hybridrl.trainer.interrupt import Interrupt, RunInterrupted, RunStopped
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.step_metrics import describe_lengths, effective_samples
from hybridrl.trainer.train_batch import balance, balance_over_ranks
from tests.config.values import config_of
from tests.trainer.rollouts import rollouts_of
from tests.workers.train.engines import make_rows


class Recorded:
    def __init__(self) -> None:
        self.lines: list[tuple[int, set[str]]] = []

    def record(self, step: int, metrics: Metrics) -> None:
        self.lines.append((step, set(metrics)))


def _loop(recorded: Recorded, *, num_steps: int, eval_every: int, num_skipped: int = 0) -> Loop:
    return Loop(
        take_step=lambda _: {"reward/mean": Mean(1.0), "policy/skipped_updates": Sum(num_skipped)},
        evaluate=lambda step: {"eval/reward/mean": Mean(float(step))},
        begin_step=lambda _: None,
        record=recorded.record,
        num_steps=num_steps,
        eval_every=eval_every,
        guard=UpdateGuard(max_skipped=2),
    )


@pytest.mark.shows("4.21")
def test_evaluation_runs_before_between_and_after_steps_or_never() -> None:
    recorded = Recorded()
    assert _loop(recorded, num_steps=5, eval_every=2).run() == 5
    evaluated = [step for step, names in recorded.lines if "eval/reward/mean" in names]
    assert evaluated == [0, 2, 4, 5]
    assert [step for step, _ in recorded.lines] == [0, 1, 2, 3, 4, 5]
    recorded.lines.clear()
    _loop(recorded, num_steps=2, eval_every=0).run()
    assert [step for step, _ in recorded.lines] == [1, 2]


@pytest.mark.parametrize(("first_step", "first"), [(1, 0), (5, 4)])
def test_a_background_evaluation_ends_behind_the_next_step_and_in_front_of_its_line(
    first_step: int, first: int
) -> None:
    recorded, told, noted = Recorded(), [], []

    def take_step(step: int) -> Metrics:
        told.append(f"step {step}")
        return {"reward/mean": Mean(1.0)}

    def begin_evaluation(step: int) -> Callable[[], Metrics]:
        told.append(f"begin {step}")

        def finish() -> Metrics:
            told.append(f"finish {step}")
            return {"eval/reward/mean": Mean(float(step))}

        return finish

    loop = replace(
        _loop(recorded, num_steps=6, eval_every=4),
        take_step=take_step,
        begin_evaluation=begin_evaluation,
        note_evaluation=lambda step, metrics: noted.append((step, *metrics)),
        first_step=first_step,
    )
    assert loop.run() == 6
    expected = ["begin 0", "step 1", "finish 0", "step 2", "step 3", "step 4"]
    expected += ["begin 4", "step 5", "finish 4", "step 6"]
    assert told == expected[expected.index(f"begin {first}") :]  # a resumed one begins again
    lines = [(step, "eval/reward/mean" in names) for step, names in recorded.lines]
    whole = [(0, True), (1, False), (2, False), (3, False), (4, False), (4, True), (5, False)]
    assert lines == [*whole[whole.index((first, True)) :], (6, True)]
    assert noted == [(step, "eval/reward/mean") for step in (0, 4) if step >= first]


@pytest.mark.shows("R9.6")
def test_skipped_updates_of_policy_or_critic_in_a_row_end_the_run() -> None:
    recorded = Recorded()
    with pytest.raises(TrainingError, match=r"3 steps in a row.*at most 2 may be skipped.*lr"):
        _loop(recorded, num_steps=9, eval_every=0, num_skipped=1).run()
    assert [step for step, _ in recorded.lines] == [1, 2, 3]
    guard = UpdateGuard(max_skipped=1)
    for num_skipped in (1, 0, 1, 0, 1):
        guard.check({"policy/skipped_updates": Sum(num_skipped)})
    with pytest.raises(TrainingError):
        guard.check({"policy/skipped_updates": Sum(1)})
    guard = UpdateGuard(max_skipped=1)
    metrics: Metrics = {"policy/skipped_updates": Sum(0), "critic/skipped_updates": Sum(4)}
    guard.check(metrics)
    with pytest.raises(TrainingError, match=r"critic\.optimizer\.lr"):
        guard.check(metrics)


@pytest.mark.shows("R1.3")
def test_interrupt_saves_after_its_step() -> None:
    recorded, saved = Recorded(), []
    loop = _loop(recorded, num_steps=9, eval_every=3)

    def save(step: int, metrics: Metrics, *, is_last: bool) -> Metrics:
        saved.append((step, is_last))
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"time/checkpoint_s": Sum(1.0)}

    assert replace(loop, save=save, first_step=5).run() == 7
    assert saved == [(5, False), (6, False), (7, True)]
    assert [step for step, _ in recorded.lines] == [5, 6, 7]  # no evaluation of step 0
    costs = [step for step, names in recorded.lines if "time/checkpoint_s" in names]
    assert costs == [6, 7]  # each on the next line


def test_second_signal_does_not_wait_for_the_step() -> None:
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    with interrupt.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.is_set
        with pytest.raises(RunInterrupted) as interrupted:
            os.kill(os.getpid(), signal.SIGHUP)
    assert interrupted.value.number == signal.SIGHUP
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.shows("R4.1")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_with_steps_left_ends_with_128_and_the_signal(number: signal.Signals) -> None:
    loop = _interrupted_in_step(4, number)
    assert loop.run() == 4
    with pytest.raises(RunStopped) as stopped:
        loop.interrupt.raise_if_unfinished()
    assert stopped.value.code == 128 + number
    loop = _interrupted_in_step(9, number)
    assert loop.run() == 9
    loop.interrupt.raise_if_unfinished()


@pytest.mark.shows("R4.3")
def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert _interrupted_in_step(4, signal.SIGHUP).run() == 9
    finally:
        signal.signal(signal.SIGHUP, before)


def _interrupted_in_step(step: int, number: signal.Signals) -> Loop:
    def take_step(current: int) -> Metrics:
        if current == step:
            os.kill(os.getpid(), number)
        return {}

    return replace(_loop(Recorded(), num_steps=9, eval_every=0), take_step=take_step)


@pytest.mark.shows("4.20")
def test_a_response_that_ends_in_a_loop_counts_as_repeating() -> None:
    generator = torch.Generator().manual_seed(0)
    varied = torch.randint(50_000, (600,), generator=generator)
    looping = torch.cat([varied, varied[:100].repeat(6), torch.tensor([1])])
    looping[-50] = 0  # not to the letter
    short = varied[:10].repeat(20)
    rows = [varied, looping, short, varied % 2]  # few different tokens
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    rollouts = rollouts_of(rows, masks, [0] * 4)
    metrics = describe_lengths(rollouts)
    assert metrics["rollout/repetition_fraction"].value == 0.25
    check_declared(metrics)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([2.0, 2.0, 2.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([3.0, 1.0], 0.8), ([0.0], 0.0)],
)
def test_effective_samples_are_a_fraction(weights: list[float], expected: float) -> None:
    mean_square = fmean(weight**2 for weight in weights)
    metrics = effective_samples(
        {
            "policy/sampler_ratio/mean": Mean(fmean(weights)),
            "policy/sampler_chi_square/mean": Mean(mean_square - 1),
        }
    )
    assert metrics["policy/effective_sample_fraction"].value == pytest.approx(expected)


NOTHING = cast(Any, None)
FOUR_RANKS = ("cluster.num_ranks_per_node=4",)


@pytest.mark.parametrize(
    ("overrides", "num_groups"),
    [
        ((), 4),
        (("actor=megatron", "megatron.tensor_parallel_size=2"), 2),
        (("actor=megatron", "megatron.pipeline_parallel_size=4"), 1),
    ],
)
def test_rows_are_balanced_over_data_parallel_ranks(
    overrides: tuple[str, ...], num_groups: int
) -> None:
    config = config_of(*FOUR_RANKS, *overrides)
    given = Ingredients(
        policy=NOTHING,
        engines=NOTHING,
        sampling=NOTHING,
        reward=NOTHING,
        kl=NOTHING,
        advantage_state=NOTHING,
        batches=NOTHING,
        on_phase=lambda _: None,
    )
    batches = build_policy_optimization(config, given).build_batch
    rows = make_rows(32, max_half=30)
    lengths = row_lengths(rows.token_ids_BL).tolist()
    expected = balance_over_ranks(lengths, dp_size=num_groups, num_minibatches=1)
    ordered = balance(rows, dp_size=batches.dp_size, num_minibatches=batches.num_minibatches)
    arranged = row_lengths(ordered.token_ids_BL).tolist()
    assert arranged == [lengths[row] for row in expected]
    with pytest.raises(DispatchError, match="cannot divide 32 rows evenly over"):
        balance(rows, dp_size=batches.dp_size, num_minibatches=3)
