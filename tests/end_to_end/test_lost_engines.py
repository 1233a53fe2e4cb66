"""Runs in which engines, or their manager, are killed at random moments: they learn the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.runs import assert_same_weights, samples_of, train
from tests.end_to_end.small import VARIED, read_metrics
from tests.serving.processes import engine_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")

SIX_STEPS = (
    *("serving=own", "trainer.num_steps=6", "eval.every_num_steps=0", "rollout.num_slots=4"),
    VARIED,
)
EACH_THIRD = "every_num_phases: 3, within_requests: 4"
LEARNING = ("reward", "policy", "length", "data", "rollout/truncated", "rollout/empty")


def learning_of(folder: Path) -> list[dict[str, float]]:
    """What a run has learned from, and how: equal if not one sample differs."""
    return [
        {name: value for name, value in line.items() if name.startswith(LEARNING)}
        for line in read_metrics(folder)
    ]


def require_equal(folder: Path, expected: Path) -> None:
    assert learning_of(folder) == learning_of(expected)
    assert samples_of(folder) == samples_of(expected)
    assert_same_weights(folder, expected)


def total(folder: Path, name: str) -> float:
    return sum(line.get(name, 0.0) for line in read_metrics(folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, *SIX_STEPS, "serving.weights=broadcast")
    return folder


def test_engines_beside_the_ranks_change_no_bit_of_a_run(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *SIX_STEPS, "serving=none")
    # Other batches round the sampler's own log-probs differently, and nothing learns from those.
    of_sampler = ("policy/sampler_", "policy/effective_sample")
    lines, expected = (
        [{k: v for k, v in line.items() if not k.startswith(of_sampler)} for line in of_run]
        for of_run in (learning_of(folder), learning_of(undisturbed))
    )
    assert lines == expected
    assert_same_weights(folder, undisturbed)
    of_engines = read_metrics(undisturbed)
    assert [line["policy/version"] for line in of_engines] == [1, 2, 3, 4, 5, 6]
    assert all(line["memory/synced_bytes"] > 0 for line in of_engines)
    assert [line["rollout/lost_engines"] for line in of_engines] == [0] * 6


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """Folder of a run that loses two engines."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    faults = f"serving.faults={{kills: {{kind: kill, {EACH_THIRD}}}}}"
    train(folder, *SIX_STEPS, faults)
    return folder


@pytest.mark.shows("4.15")
def test_a_run_whose_engines_are_killed_learns_the_same(undisturbed: Path, killed: Path) -> None:
    require_equal(killed, undisturbed)
    assert [line["rollout/lost_engines"] for line in read_metrics(killed)] == [0, 0, 1, 0, 0, 1]
    assert total(killed, "rollout/repeated_requests") > 0
    assert 1 <= total(killed, "rollout/replaced_engines") <= 2  # the last may come after the end
    assert total(killed, "time/replace_engine_s") > 0


def test_the_run_folder_tells_why_an_engine_was_lost(killed: Path) -> None:
    log = (killed / "servers" / "manager.txt").read_text()
    assert len(re.findall(r"an engine was lost: model=policy engine=\d reason=.*gone", log)) == 2
    assert re.search(r"an engine was replaced: model=policy engine=\d took_s=\d+\.\d", log)
    engines = [(killed / "servers" / f"policy-engine-{number}.txt").is_file() for number in (0, 1)]
    assert engines == [True, True]
    events = json.loads((killed / "trace.json").read_text())
    lost = next(event for event in events if event["name"] == "engine lost")
    assert lost["dur"] > 0
    assert "gone" in lost["args"]["reason"]
    page = (killed / "report.html").read_text()
    assert "Rollout engines were lost" in page
    assert "an engine was lost: model=policy" in page


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["stop", "cut", "error", "tokens", "logprobs"])
def test_a_run_whose_engines_hang_or_err_learns_the_same(
    kind: str, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    faults = f"serving.faults={{some: {{kind: {kind}, {EACH_THIRD}}}}}"
    train(folder, *SIX_STEPS, faults, "serving.health_timeout_s=2")
    require_equal(folder, undisturbed)
    assert total(folder, "rollout/lost_engines") == 2
    assert 1 <= total(folder, "rollout/replaced_engines") <= 2
    wait_until(lambda: not engine_processes())


def test_a_run_whose_manager_is_killed_learns_the_same(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    faults = "serving.faults={it: {kind: kill_manager, every_num_phases: 4, within_requests: 4}}"
    restarts = ("checkpoint.every_num_steps=1", "checkpoint.max_restarts=2")
    train(folder, *SIX_STEPS, *restarts, faults)
    require_equal(folder, undisturbed)
    log = (folder / "log.txt").read_text()
    assert "sample: the rollout manager is gone" in log
    assert "workers are started again" in log  # a new manager counts its phases anew
    wait_until(lambda: not engine_processes())  # those of dead managers ended with them
