"""The monitor over recording engines, with a clock of the test's own."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest

from hybridrl.errors import EngineError
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.health import HealthMonitor
from tests.serving.recording_handle import RecordingHandle
from tests.waiting import wait_until
from tests.workers.sharding.recording import Journal

TIMEOUT_S = 100.0


class Rig:
    """A monitor that looks when the test says so."""

    def __init__(self, num_engines: int = 1, *, timeout_s: float = TIMEOUT_S) -> None:
        journal = Journal()
        self.engines = [RecordingHandle(index, journal) for index in range(num_engines)]
        self.reports: list[tuple[int, str]] = []
        self.now_s = 0.0
        self.monitor = HealthMonitor(
            lambda: cast("dict[int, EngineHandle]", dict(enumerate(self.engines))),
            lambda index, _, reason: self.reports.append((index, reason)),
            timeout_s=timeout_s,
        )

    def look(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.monitor.look(self.now_s)


@pytest.mark.parametrize("answer", ["the same", "an error", None])
@pytest.mark.shows("4.14")
def test_an_engine_without_progress_is_reported_after_the_time_and_a_busy_one_never(
    answer: str | None,
) -> None:
    rig = Rig(2)
    busy, stuck = rig.engines
    rig.look()
    for number in range(12):
        busy.probes[-1].set_result(number)  # further at each look
        if answer == "an error" and not stuck.probes[-1].done():
            stuck.probes[-1].set_exception(EngineError("no answer"))
        elif answer == "the same" and not stuck.probes[-1].done():
            stuck.probes[-1].set_result(answer)
        last_s = TIMEOUT_S + 10 * (answer == "the same")  # the first answer is progress
        rig.look(after_s=10.0)
        assert bool(rig.reports) == (rig.now_s > last_s)
    assert {index for index, _ in rig.reports} == {1}
    assert "serving.health_timeout_s=100 s" in rig.reports[0][1]
    assert answer or len(stuck.probes) == 1  # it is asked once, and not again and again


def test_a_dead_engine_is_reported_at_the_next_look() -> None:
    rig = Rig(2)
    rig.look()
    rig.engines[1].kill()
    rig.look(after_s=0.1)
    assert rig.reports == [(1, "its process is gone")]


@pytest.mark.shows("2.12", "4.14")
def test_a_pause_waits_for_the_probe_in_flight() -> None:
    rig = Rig()
    rig.look()
    pausing = threading.Thread(target=rig.monitor.stop)
    pausing.start()
    pausing.join(0.2)
    assert pausing.is_alive()
    rig.engines[0].probes[0].set_result(1)
    pausing.join(60.0)
    assert not pausing.is_alive()
    assert len(rig.engines[0].probes) == 1


@pytest.mark.shows("2.12", "4.14")
def test_a_paused_engine_is_not_taken_for_a_dead_one_when_it_goes_on() -> None:
    rig = Rig(timeout_s=0.05)  # so long a pause waits for the probe in flight
    rig.look()
    rig.monitor.stop()
    rig.look(after_s=1.0)
    rig.look(after_s=0.04)
    assert rig.reports == []
    rig.look(after_s=0.02)
    assert len(rig.reports) == 1


def test_engines_are_watched_in_the_block_alone() -> None:
    rig = Rig(timeout_s=0.2)
    with rig.monitor.watching():
        wait_until(lambda: rig.reports)
    num_reports, num_probes = len(rig.reports), len(rig.engines[0].probes)
    time.sleep(0.2)
    assert (len(rig.reports), len(rig.engines[0].probes)) == (num_reports, num_probes)
    assert not any(thread.name == "health" for thread in threading.enumerate())
