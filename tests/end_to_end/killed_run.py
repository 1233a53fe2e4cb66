"""A run whose processes are killed at drawn moments; given its command again after each end."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import psutil

from benchmarks.child import Child
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.processes.guard import members_of
from tests.waiting import wait_until

log = logging.getLogger(__name__)

Kind = Literal["driver", "rank", "manager", "engine"]

CLASSES: dict[Kind, str] = {
    "rank": "ActorRolloutWorker",
    "manager": "RolloutManager",
    "engine": "EngineProcess",
}
"""Names that Ray gives to the processes of its actors."""

_MOST_STEPS = 2


@dataclass
class KilledRun:
    """One run folder, and the process that works on it now."""

    config: ExperimentConfig
    folder: Path
    """Of the run."""
    random: Random
    """Draws the moments and, among equals, the process."""
    killed: Counter[Kind] = field(default_factory=Counter)
    num_starts: int = 0

    def __post_init__(self) -> None:
        self._child = self._start()

    def run(self, kinds: Sequence[Kind]) -> None:
        """Kill a process of each kind in turn, and wait for the end of the run."""
        for kind in kinds:
            self._wait_for_the_moment()
            process = self._await_process(kind)
            lines = self._num_lines()
            process.kill()
            self.killed[kind] += 1
            log.info("kill %d: %s, after step %d", self.killed.total(), kind, lines)
            if kind == "driver":
                self._begin_again()
        while (status := self._child.poll()) is None:
            time.sleep(0.1)
        assert status == 0, self._child.tail(60)

    def end(self) -> None:
        """Kill what is left. Idempotent."""
        self._child.kill()

    def processes(self) -> list[int]:
        """Those that the run's newest command has started, itself too."""
        return members_of(self._child.pid)

    # -- the processes of the run ----------------------------------------------------------------

    def _start(self) -> Child:
        self.num_starts += 1
        process = self.folder.with_suffix(".process")
        process.mkdir(exist_ok=True)
        return Child(self.config, folder=process)

    def _begin_again(self) -> None:
        """Wait until all processes of a dead driver have ended by themselves; start it again."""
        workers = [one for kind in CLASSES for one in self._of(kind)]
        wait_until(lambda: self._child.poll() is not None)
        wait_until(lambda: not any(is_alive(worker) for worker in workers))
        self._child.kill()  # of Ray's own two stay for a minute
        self._child = self._start()

    def _of(self, kind: Kind) -> list[psutil.Process]:
        if kind == "driver":
            return [psutil.Process(self._child.pid)]
        processes = []
        for pid in members_of(self._child.pid):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(f"ray::{CLASSES[kind]}" in word for word in process.cmdline()):
                    processes.append(process)
        return processes

    def _await_process(self, kind: Kind) -> psutil.Process:
        processes: list[psutil.Process] = []

        def find() -> bool:
            self._require_running()
            processes.extend(self._of(kind))
            return bool(processes)

        wait_until(find, deadline_s=180)
        return self.random.choice(processes)

    # -- the moments -----------------------------------------------------------------------------

    def _wait_for_the_moment(self) -> None:
        """By turns drawn: some steps and a second later, or some seconds after the last kill.

        The latter is often while workers start or stop, and never after more than two steps.
        """
        is_in_steps = self.random.random() < 0.5
        num_steps = self.random.randint(1, _MOST_STEPS) if is_in_steps else _MOST_STEPS
        delay_s = self.random.uniform(0.0, 1.0 if is_in_steps else 12.0)
        end_s = time.monotonic() + (0.0 if is_in_steps else delay_s)
        fewest = self._num_lines()

        def is_over() -> bool:
            nonlocal fewest
            self._require_running()
            now = self._num_lines()
            fewest = min(fewest, now)  # a run that resumes goes back to its checkpoint
            return now >= fewest + num_steps or (not is_in_steps and time.monotonic() >= end_s)

        wait_until(is_over, deadline_s=300)
        if is_in_steps:
            time.sleep(delay_s)

    def _require_running(self) -> None:
        status = self._child.poll()
        assert status is None, f"the run ended with {status}:\n{self._child.tail(80)}"

    def _num_lines(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is there, and no zombie."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
