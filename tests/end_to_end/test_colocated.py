"""Runs whose ranks lend their engines to the rollout manager, alone and beside an own engine."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybridrl.errors import WorkerDiedError
from tests.end_to_end.runs import train
from tests.end_to_end.small import VARIED
from tests.end_to_end.test_faults import run_into
from tests.serving.processes import engine_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")

SMALL = ("eval.every_num_steps=0", "rollout.num_slots=4", VARIED)
COLOCATED = (*SMALL, "recipes=cpu/colocated", "trainer.num_steps=4")
MIXED = (*SMALL, "recipes=cpu/mixed", "trainer.num_steps=3")


def faults(kind: str, *, every: int) -> str:
    return f"serving.faults={{it: {{kind: {kind}, every_num_phases: {every}, within_requests: 4}}}}"


def require_good(lines: list[dict[str, float]], *, num_steps: int) -> None:
    """No prompt is lost or doubled, and each token is of the newest weights."""
    assert [line["data/prompts"] for line in lines] == [4 * (n + 1) for n in range(num_steps)]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    assert [line["policy/version"] for line in lines] == list(range(1, num_steps + 1))


@pytest.mark.shows("4.1", "4.15")
def test_a_lost_engine_of_a_rank_is_back_in_the_next_phase(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", *COLOCATED, faults("error", every=2))
    require_good(lines, num_steps=4)
    assert [line["rollout/lost_engines"] for line in lines] == [0, 1, 0, 1]
    assert [line["rollout/replaced_engines"] for line in lines] == [0, 0, 1, 0]
    assert [line["rollout/repeated_requests"] > 0 for line in lines] == [False, True, False, True]
    assert all(line["time/restart_s"] > 0 for line in lines[1::2])


@pytest.mark.shows("4.3")
def test_own_engines_serve_beside_those_of_the_ranks(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", *MIXED)
    require_good(lines, num_steps=3)
    assert [line["rollout/lost_engines"] for line in lines] == [0, 0, 0]
    wait_until(lambda: not engine_processes())


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [COLOCATED, MIXED], ids=["colocated", "mixed"])
def test_a_killed_manager_starts_the_workers_again(recipe: tuple[str, ...], tmp_path: Path) -> None:
    restarts = ("checkpoint.every_num_steps=1", "checkpoint.max_restarts=4")
    lines = train(tmp_path / "run", *recipe, *restarts, faults("kill_manager", every=3))
    require_good(lines, num_steps=len(lines))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "sample: the rollout manager is gone" in log
    assert "workers are started again" in log


@pytest.mark.nightly
@pytest.mark.shows("4.22")
@pytest.mark.parametrize("phase", ["generate", "update"])
@pytest.mark.parametrize("recipe", [COLOCATED, MIXED], ids=["colocated", "mixed"])
def test_a_killed_rank_ends_the_run_by_name(
    recipe: tuple[str, ...], phase: str, tmp_path: Path
) -> None:
    error = run_into(tmp_path / "run", *recipe, at=phase, number=signal.SIGKILL)
    assert isinstance(error, WorkerDiedError)
    assert "killed by signal 9" in str(error) or "without a word" in str(error)
    wait_until(lambda: not processes_of_the_run())


def processes_of_the_run() -> list[str]:
    """The ranks, the manager and own engines of this test."""
    titles = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            titles.append(" ".join(one.cmdline()))
    names = ("ActorRolloutWorker", "RolloutManager", "RolloutProcess")
    return [title for title in titles if any(name in title for name in names)]
