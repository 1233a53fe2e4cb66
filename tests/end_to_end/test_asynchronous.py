"""Runs whose engines sample ahead: bounded staleness, no prompt lost or doubled over kills."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from hybridrl.errors import WorkerDiedError
from tests.end_to_end.runs import prompts_in_order, samples_of, train
from tests.end_to_end.small import VARIED, read_metrics, small_config
from tests.end_to_end.test_faults import find_ranks, run_into
from tests.serving.processes import engine_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_STEPS, NUM_PROMPTS = 6, 4
AHEAD = (
    *("serving=own", "rollout.num_slots=4", f"trainer.num_steps={NUM_STEPS}"),
    *("algorithm.rollout_correction=importance", "eval.every_num_steps=4"),
    f"tracking.num_samples_per_step={NUM_PROMPTS}",
    VARIED,
)


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(folder) if line["step"]]


def require_each_prompt_once(folder: Path) -> None:
    """The prompts that a synchronous run draws in as many steps, each in one step."""
    drawn = prompts_in_order(small_config(folder, *AHEAD), NUM_STEPS * NUM_PROMPTS)
    samples = samples_of(folder, "train")
    assert Counter(each["prompt"] for each in samples) == Counter(drawn)  # two may be equal
    assert set(Counter(each["step"] for each in samples).values()) == {NUM_PROMPTS}


def require_bounded(folder: Path, max_staleness: int) -> None:
    for number, line in enumerate(steps_of(folder)):
        assert line["rollout/staleness_steps/max"] <= min(number, max_staleness)
        assert line["time/wait_for_groups_s"] >= 0
        assert line["time/engines_idle_s"] >= 0
        all_tokens = line["throughput/tokens_per_s"] * line["time/step_s"]
        assert line["throughput/response_tokens_per_s"] * line["time/step_s"] < all_tokens
        assert line["rollout/open_groups"] == (
            min(max_staleness, NUM_STEPS - 1 - number) * NUM_PROMPTS
        )


@pytest.mark.parametrize(
    ("max_staleness", "on_update"),
    [(2, "interrupt"), pytest.param(1, "finish", marks=pytest.mark.nightly)],
)
def test_a_run_samples_ahead_while_its_engines_are_killed(
    max_staleness: int, on_update: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = (
        *(f"trainer.max_staleness={max_staleness}", f"serving.on_update={on_update}"),
        "serving.faults={kills: {kind: kill, every_num_phases: 2, within_requests: 3}}",
    )
    train(folder, *AHEAD, *keys)
    require_bounded(folder, max_staleness)
    require_each_prompt_once(folder)
    lines = steps_of(folder)
    assert max(line["rollout/staleness_steps/max"] for line in lines) > 0
    assert sum(line["rollout/lost_engines"] for line in lines) >= 1
    assert [line["step"] for line in lines if "eval/reward/mean" in line] == [4, 6]


@pytest.mark.nightly
def test_open_responses_lose_their_tokens_to_new_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    slow = ("rollout.num_slots=1", "rollout.max_response_tokens=96")  # so responses are open
    keys = ("trainer.max_staleness=2", "serving.on_update=abort", *slow)
    train(folder, *AHEAD, *keys)
    require_bounded(folder, 2)
    require_each_prompt_once(folder)
    lines = steps_of(folder)
    assert sum(line.get("rollout/aborted_responses", 0.0) for line in lines) > 0
    assert sum(line.get("rollout/aborted_tokens", 0.0) for line in lines) > 0
    assert not any("rollout/interrupted_responses" in line for line in lines)
    assert all("rollout/aborted_tokens" in line for line in lines)


@pytest.mark.nightly
def test_a_rank_that_dies_while_engines_sample_leaves_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = (*AHEAD, "trainer.max_staleness=2", "rollout.max_response_tokens=24")
    error = run_into(folder, *keys, at="update", number=signal.SIGKILL)
    assert isinstance(error, WorkerDiedError)
    assert "update" in error.__notes__[-2]
    assert steps_of(folder)[-1]["rollout/open_groups"] == 2 * NUM_PROMPTS
    assert find_ranks(os.getpid()) == []
    wait_until(lambda: not engine_processes())
