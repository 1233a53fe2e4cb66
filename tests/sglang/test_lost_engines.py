"""Whole runs on SGLang, in which servers, their router or their manager are killed repeatedly."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.small import SMALL, VARIED
from tests.sglang.test_run import processes_of, require_agreement

NUM_STEPS, EVERY_NUM_STEPS = 20, 3
NUM_KILLS = NUM_STEPS // EVERY_NUM_STEPS
TIMEOUT_S = 1500
"""After most kills a server starts beside one that samples, on two cores."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(TIMEOUT_S + 20)]


@pytest.mark.shows("4.15")
def test_a_run_loses_no_sample_to_killed_servers(tmp_path: Path) -> None:
    lines = trained(tmp_path, fault_of("kill", every_num_phases=EVERY_NUM_STEPS))
    assert sum(line["rollout/lost_engines"] for line in lines) == NUM_KILLS
    replaced = sum(line["rollout/replaced_engines"] for line in lines)
    assert NUM_KILLS - 1 <= replaced <= NUM_KILLS  # the last may come after the end
    assert sum(line["rollout/repeated_requests"] for line in lines) >= NUM_KILLS


def test_a_run_loses_no_sample_to_killed_managers(tmp_path: Path) -> None:
    # Each new manager counts its phases anew. Its first is the step in which one was killed, or the
    # step before, whose checkpoint was still being written: the next dies 3 or 2 steps later.
    trained(tmp_path, fault_of("kill_manager", every_num_phases=EVERY_NUM_STEPS + 1))
    log = (tmp_path / "run" / "log.txt").read_text()
    most = (NUM_STEPS - 2) // (EVERY_NUM_STEPS - 1)
    assert NUM_KILLS <= log.count("workers are started again") <= most


@pytest.mark.shows("4.22")
def test_a_run_loses_no_sample_to_killed_routers(tmp_path: Path) -> None:
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_routers, tmp_path, has_ended)
        try:
            lines = trained(tmp_path, "serving.router=sglang")
        finally:
            has_ended.set()
    assert killing.result() == NUM_KILLS
    restarts = sum(line["rollout/router_restarts"] for line in lines)
    assert NUM_KILLS - 1 <= restarts <= NUM_KILLS  # one within a start of another counts once
    assert sum(line["rollout/lost_engines"] for line in lines) == 0


def fault_of(kind: str, *, every_num_phases: int) -> str:
    each = f"kind: {kind}, every_num_phases: {every_num_phases}, within_requests: 4"
    return f"serving.faults={{it: {{{each}}}}}"


def trained(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a run of which no prompt is lost or counts twice."""
    lines = require_agreement(
        folder,
        *("serving=own", *SMALL, VARIED, "eval.every_num_steps=0"),
        *("checkpoint.every_num_steps=1", "cluster.call_timeout_s=300", *overrides),
        num_steps=NUM_STEPS,
        timeout_s=TIMEOUT_S,
    )
    assert [line["data/prompts"] for line in lines] == [4 * (n + 1) for n in range(NUM_STEPS)]
    return lines


def kill_routers(folder: Path, has_ended: threading.Event) -> int:
    """Kill the router at a random moment of every third step; return how often."""
    num_kills = 0
    metrics = folder / "run" / "metrics.jsonl"
    while num_kills < NUM_KILLS and not has_ended.wait(0.05):
        num_steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if num_steps >= EVERY_NUM_STEPS * (num_kills + 1) - 1:
            has_ended.wait(random.uniform(0.0, 2.0))
            for process in processes_of(folder, "sglang::router"):
                process.kill()
                num_kills += 1
    return num_kills
