"""The monitor over recording engines, with a clock of the test's own."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hybridrl.errors import EngineError
from hybridrl.serving.engine_handle import EngineHandle
from hybridrl.serving.health import HealthMonitor
from tests.serving.recording_handle import RecordingHandle
from tests.waiting import wait_until
from tests.workers.sharding.recording import Journal

TIMEOUT_S = 100.0


class Rig:
    """A monitor that looks when the test says so, and not while it is paused."""

    def __init__(self, num_engines: int, *, timeout_s: float = TIMEOUT_S) -> None:
        journal = Journal()
        self.engines = [RecordingHandle(index, journal) for index in range(num_engines)]
        self.reports: list[tuple[int, str]] = []
        self.now_s = 0.0
        self.monitor = HealthMonitor(self._serving, self._report, timeout_s=timeout_s)
        self.is_paused = True

    def _serving(self) -> dict[int, EngineHandle]:
        return dict(enumerate(self.engines))

    def _report(self, index: int, engine: EngineHandle, reason: str) -> None:
        self.reports.append((index, reason))

    def resume(self) -> None:
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True
        self.monitor.stop()

    def look(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        if not self.is_paused:
            self.monitor.look(self.now_s)

    def answer(self, index: int, progress: object) -> None:
        """Let an engine answer the probe in flight, if there is one."""
        probes = self.engines[index].probes
        if probes and not probes[-1].done():
            probes[-1].set_result(progress)


@pytest.mark.shows("4.14")
def test_an_engine_without_progress_is_reported_after_the_time() -> None:
    rig = Rig(2)
    rig.resume()
    rig.look()
    for number in range(10):
        rig.answer(0, number)  # busy: further at each look
        rig.answer(1, "stuck")
        rig.look(after_s=TIMEOUT_S / 8)
    assert {index for index, _ in rig.reports} == {1}
    assert "serving.health_timeout_s=100 s" in rig.reports[0][1]


def test_an_engine_that_does_not_answer_at_all_is_reported() -> None:
    rig = Rig(1)
    rig.resume()
    rig.look()
    rig.look(after_s=TIMEOUT_S)
    assert rig.reports == []
    rig.look(after_s=1.0)
    assert len(rig.reports) == 1
    assert len(rig.engines[0].probes) == 1  # it is asked once, and not again and again


def test_an_engine_whose_probes_fail_makes_no_progress() -> None:
    rig = Rig(1)
    rig.resume()
    for _ in range(12):
        rig.look(after_s=TIMEOUT_S / 10)
        if rig.engines[0].probes:
            rig.engines[0].probes[-1].set_exception(EngineError("no answer"))
            rig.engines[0].probes.clear()
    assert rig.reports


def test_a_dead_engine_is_reported_at_the_next_look() -> None:
    rig = Rig(2)
    rig.resume()
    rig.look()
    rig.engines[1].kill()
    rig.look(after_s=0.1)
    assert rig.reports == [(1, "its process is gone")]


@pytest.mark.shows("2.12", "4.14")
def test_a_pause_waits_for_the_probe_in_flight() -> None:
    rig = Rig(1)
    rig.resume()
    rig.look()
    pausing = threading.Thread(target=rig.pause)
    pausing.start()
    pausing.join(0.2)
    assert pausing.is_alive()
    rig.answer(0, 1)
    pausing.join(60.0)
    assert not pausing.is_alive()
    rig.look(after_s=10 * TIMEOUT_S)
    assert rig.reports == []
    assert len(rig.engines[0].probes) == 1


def test_the_wait_begins_anew_at_each_resume() -> None:
    rig = Rig(1, timeout_s=0.05)  # so long a pause waits for the probe in flight
    rig.resume()
    rig.look()
    rig.pause()
    rig.now_s += 1.0
    rig.resume()
    rig.look()
    rig.look(after_s=0.04)
    assert rig.reports == []
    rig.look(after_s=0.02)
    assert len(rig.reports) == 1


class Lives(RuleBasedStateMachine):
    """Whatever happens, a reported engine was dead, or without progress for all the time."""

    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.rig = Rig(count, timeout_s=0.05)  # a pause waits so long for a hung one
        self.unit_s = 0.05
        self.is_resumed = False
        self.hung: set[int] = set()
        self.moved_s = dict.fromkeys(range(count), 0.0)
        self.step = 0
        self.num_probes = 0

    @rule()
    def resume(self) -> None:
        self.rig.resume()
        if not self.is_resumed:
            self.moved_s = dict.fromkeys(self.moved_s, self.rig.now_s)
        self.is_resumed = True

    @rule()
    def pause_and_update(self) -> None:
        """The engines are paused meanwhile: none is asked, none gets further."""
        self.rig.pause()
        self.is_resumed = False
        self.num_probes = sum(len(engine.probes) for engine in self.rig.engines)

    @rule(victim=st.integers(0, 3), is_kill=st.booleans())
    def harm(self, victim: int, *, is_kill: bool) -> None:
        index = victim % len(self.rig.engines)
        if is_kill:
            self.rig.engines[index].kill()
        else:
            self.hung.add(index)

    @rule(units=st.sampled_from([0.1, 0.5, 0.9, 3.0]))
    def let_time_pass(self, units: float) -> None:
        """Engines that do not hang answer before each look."""
        before = len(self.rig.reports)
        for _ in range(4):
            self.step += 1
            for index in set(self.moved_s) - self.hung:
                self.rig.answer(index, self.step)
            self.rig.look(after_s=units * self.unit_s / 4)
        reported = {index for index, _ in self.rig.reports[before:]}
        for index in reported:
            assert self.is_resumed
            assert index in self.hung or not self.rig.engines[index].is_alive()
        if self.is_resumed:
            dead = {i for i in self.moved_s if not self.rig.engines[i].is_alive()}
            assert dead <= reported
            if units > 1.0:
                assert self.hung <= reported

    @invariant()
    def no_engine_is_asked_while_paused(self) -> None:
        if not self.is_resumed and self.num_probes:
            assert sum(len(engine.probes) for engine in self.rig.engines) == self.num_probes


@pytest.mark.shows("2.12", "4.14")
def test_a_busy_or_paused_engine_is_never_taken_for_a_dead_one() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(max_examples=25, stateful_step_count=12, derandomize=True, database=None),
    )


def test_engines_are_watched_in_the_block_alone() -> None:
    rig = Rig(1, timeout_s=0.2)
    with rig.monitor.watching():
        wait_until(lambda: rig.reports)
    num_reports, num_probes = len(rig.reports), len(rig.engines[0].probes)
    time.sleep(0.2)
    assert (len(rig.reports), len(rig.engines[0].probes)) == (num_reports, num_probes)
    assert not any(thread.name == "health" for thread in threading.enumerate())
