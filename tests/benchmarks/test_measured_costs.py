"""Costs of a run, fitted to its steps: those of a simulated run come out as they went in."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks.asynchronous import draw, print_runs
from benchmarks.sides.measured_runs import (
    MeasuredRun,
    fit,
    fit_costs,
    read_lengths,
    read_run,
    write_rows,
)
from benchmarks.sides.simulation import Costs, DecodeCost, HeavyTail, Topology, simulate
from hybridrl.batch import PromptBatch, RolloutBatch, jagged
from hybridrl.sampler import SamplingParams
from hybridrl.trainer.rollout_files import RolloutFiles, name_of

COSTS = Costs(
    decode=DecodeCost(fixed_s=0.004, per_response_s=0.0002),
    num_slots=32,
    train_s_per_token=0.001,
    train_fixed_s=0.1,
    transfer_s=0.05,
    recompute_s_per_token=0.0,
)
DRAW = HeavyTail(median_tokens=12, sigma=1.0, max_tokens=100, num_responses=4)
LENGTHS = [[DRAW(source) for _ in range(8)] for source in map(random.Random, range(12))]


def simulated_run(costs: Costs) -> MeasuredRun:
    groups = (group for step in LENGTHS for group in step)
    topology = Topology(num_engines=1, num_trainer_devices=1)
    steps = simulate(topology, costs, lambda _: next(groups), num_prompts=8, num_steps=12)
    metrics = [
        {"time/step_s": one.ended_s - one.began_s, "time/generate_s": one.trains_s - one.began_s}
        for one in steps
    ]
    return MeasuredRun(steps=metrics, accuracies=[(0.0, 0.25), (10.0, 0.5), (20.0, 1.0)])


def test_costs_of_a_simulated_run_are_those_it_ran_with() -> None:
    fitted = fit_costs(simulated_run(COSTS), LENGTHS, num_slots=32)
    assert fitted.decode.fixed_s == pytest.approx(COSTS.decode.fixed_s, rel=1e-3)
    assert fitted.decode.per_response_s == pytest.approx(COSTS.decode.per_response_s, rel=1e-3)
    assert fitted.transfer_s == pytest.approx(COSTS.transfer_s, rel=1e-3)
    assert fitted.train_s_per_token == pytest.approx(COSTS.train_s_per_token, rel=1e-3)
    assert fitted.train_fixed_s == pytest.approx(COSTS.train_fixed_s, rel=1e-3)


def test_no_fitted_factor_is_negative() -> None:
    ones, rising = torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert fit([ones, rising], torch.tensor([5.0, 7.0, 9.0, 11.0])) == pytest.approx([3.0, 2.0])
    assert fit([ones, rising], torch.tensor([4.0, 3.0, 2.0, 1.0])) == pytest.approx([2.5, 0.0])
    assert fit([ones, rising], -ones) == [0.0, 0.0]


def test_real_steps_stand_beside_simulated_ones(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {0: simulated_run(COSTS)}
    print_runs(runs, COSTS, LENGTHS)
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 0 |")]
    rate = f"{runs[0].steps_per_hour:,.0f}"
    assert row == f"| 0 | {rate} | 1.00 | {rate} | 1.00 |  |  |  |  | 1.000 |"


def test_accuracy_is_read_at_equal_seconds_of_training(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "elapsed_s": 9.0, "eval/reward/mean": 0.2},
        {"step": 1, "elapsed_s": 12.0, "time/step_s": 2.0},
        {"step": 2, "elapsed_s": 19.0, "time/step_s": 2.0, "eval/reward/mean": 0.6},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = read_run(tmp_path)
    assert [run.accuracy_at(seconds) for seconds in (0, 1, 4, 9)] == pytest.approx(
        [0.2, 0.3, 0.6, 0.6]
    )
    assert len(run.steps) == 2
    assert run.mean("time/wait_for_groups_s") is None


def test_the_curves_of_runs_end_at_their_last_second() -> None:
    slow = MeasuredRun(steps=[], accuracies=[(0.0, 0.0), (40.0, 0.5)])
    fast = MeasuredRun(steps=[], accuracies=[(0.0, 0.0), (20.0, 1.0)])
    picture = draw({0: slow, 4: fast})
    assert 'points="46.0,254.0 714.0,150.0"' in picture
    assert 'points="46.0,254.0 380.0,46.0"' in picture
    assert ">K = 4</text>" in picture


def test_rows_to_sort_have_a_heavy_tail(tmp_path: Path) -> None:
    for split in ("train", "eval"):
        lines = write_rows(split, tmp_path).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert all("".join(sorted(row["prompt"][:-1])) == row["answer"] for row in rows)
        digits = sorted(len(row["answer"]) for row in rows)
        assert 6 <= digits[len(digits) // 2] <= 10
        assert digits[-1] > 60


def test_lengths_are_read_from_the_responses_that_a_run_wrote(tmp_path: Path) -> None:
    sampled = [3, 1, 2, 5]
    tokens = [torch.arange(4 + length) for length in sampled]
    prompts = PromptBatch(
        token_ids_PL=jagged([torch.arange(4), torch.arange(4)]),
        prompt_index_P=torch.arange(2),
        seed_P=torch.arange(2),
        batch_size=[2],
    )
    rollouts = RolloutBatch(
        token_ids_BL=jagged(tokens),
        response_mask_BL=jagged([row_L >= 4 for row_L in tokens]),
        sampler_logprobs_BL=jagged([torch.zeros(len(row_L)) for row_L in tokens]),
        prompt_index_B=torch.tensor([0, 0, 1, 1]),
        policy_version_B=torch.zeros(4, dtype=torch.int64),
        is_truncated_B=torch.zeros(4, dtype=torch.bool),
        batch_size=[4],
    )
    sampling = SamplingParams(
        num_responses_per_prompt=2, max_response_tokens=8, temperature=1.0, stop_token_ids=(0,)
    )
    files = RolloutFiles(tmp_path / "rollouts")
    files.write(name_of(1, "train", 0), prompts, rollouts, sampling=sampling, origin={})
    assert read_lengths(tmp_path, num_steps=1) == [[[3, 1], [2, 5]]]
    with pytest.raises(FileNotFoundError, match="rollouts has no responses of step 2"):
        read_lengths(tmp_path, num_steps=2)
