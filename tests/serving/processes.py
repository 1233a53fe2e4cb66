from __future__ import annotations

import math
from collections.abc import Callable

import psutil

from tests.waiting import wait_until


def engine_processes() -> list[psutil.Process]:
    """The actors of this test's engines."""
    return processes_with("RolloutProcess")


def servers_below() -> list[psutil.Process]:
    """The processes in which SGLang's servers of this test began."""
    return processes_with("hybridrl.workers.rollout.sglang.child", "tests.sglang.warm")


def processes_with(*words: str, below: int | None = None) -> list[psutil.Process]:
    """The processes below one whose command lines have one of the words."""
    processes = psutil.Process(below).children(recursive=True)
    return [one for one in processes if any(w in each for each in _words_of(one) for w in words)]


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def wait_for_a_busy_process(processes: Callable[[], list[psutil.Process]]) -> psutil.Process:
    """Wait until one of these has computed for a tenth of a second, with its children."""
    before = {process.pid: cpu_s(process) for process in processes()}
    busy: list[psutil.Process] = []

    def is_busy() -> bool:
        busy.extend(p for p in processes() if cpu_s(p) > before.get(p.pid, math.inf) + 0.1)
        return bool(busy)

    wait_until(is_busy)
    return busy[0]


def cpu_s(process: psutil.Process) -> float:
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)
