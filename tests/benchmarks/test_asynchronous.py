"""The benchmark of runs that sample ahead: what it reads, draws and prints of run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.asynchronous import MeasuredRun, draw, print_runs, read_run, write_rows


def test_steps_per_hour_stand_beside_those_of_the_first_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = {0: 2.0, 4: 1.0}
    runs = {
        k: MeasuredRun(
            steps=[{"time/step_s": seconds, "rollout/staleness_steps/mean": float(k)}] * 6,
            accuracies=[(0.0, 0.25), (10.0, 0.5)],
        )
        for k, seconds in steps.items()
    }
    print_runs(runs)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert rows[0] == "| 0 | 1,800 | 1.00 |  |  |  | 0.00 | 0.500 |"
    assert rows[1] == "| 4 | 3,600 | 2.00 |  |  |  | 4.00 | 0.500 |"


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
