"""Runs whose weights are broadcast to servers, of which one is killed in the middle of a sync."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tests.end_to_end.small import read_metrics
from tests.sglang.test_run import processes_of, require_agreement

NUM_STEPS = 6
TIMEOUT_S = 1200
"""For two kills, after each of which a server starts beside ranks that wait, on two cores."""

Victim = Literal["server", "process"]


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.shows("4.12")
def test_a_server_killed_in_a_broadcast_is_replaced_alone(tmp_path: Path) -> None:
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_in_broadcasts, tmp_path, ("server", "process"), has_ended)
        try:
            lines = require_agreement(
                tmp_path,
                *("recipes=calculator_cpu", "serving=own", "serving.weights=broadcast"),
                "rollout.bucket_mib=1",  # so that a transfer takes longer than a look at it
                *("eval.every_num_steps=0", "checkpoint.every_num_steps=0"),
                "cluster.call_timeout_s=600",
                num_steps=NUM_STEPS,
                timeout_s=TIMEOUT_S,
            )
        finally:
            has_ended.set()
    assert killing.result() == 2
    for name, count in (("lost_engines", 2), ("replaced_engines", 2), ("repeated_requests", 0)):
        assert sum(line[f"rollout/{name}"] for line in lines) == count
    assert all(line["agent/turns/mean"] > 1 for line in lines)
    assert all(line["policy/grad_norm"] > 0 for line in lines)  # each version has other weights


def kill_in_broadcasts(folder: Path, victims: Sequence[Victim], has_ended: threading.Event) -> int:
    """Kill a member of a transfer to both engines, once for each kind; return how many were.

    Two steps pass between them.
    """
    num_kills = 0
    while num_kills < len(victims) and not has_ended.wait(0.2):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            senders = senders_of(folder)
            engines = processes_of(folder, "ray::EngineProcess")
            is_due = len(read_metrics(folder / "run")) >= 2 * num_kills
            if is_due and senders and len(engines) == 2:
                num_kills += kill_in_transfer(senders[0], engines, victims[num_kills])
    return num_kills


def kill_in_transfer(
    sender: psutil.Process, engines: Sequence[psutil.Process], victim: Victim
) -> bool:
    """Kill as soon as both engines are connected; False if they are not within some seconds."""
    for _ in range(1000):
        if all(is_connected(engine, sender) for engine in engines):
            member_of(engines[-1], victim).kill()
            return True
        time.sleep(0.005)
    return False


def senders_of(folder: Path) -> list[psutil.Process]:
    return [one for one in processes_of(folder, "python") if sends(one)]


def sends(process: psutil.Process) -> bool:
    words = process.cmdline()
    return any("weight_sender_child" in word for word in words) and "guard.py" not in str(words)


def is_connected(engine: psutil.Process, sender: psutil.Process) -> bool:
    """Whether an engine is in the group of a transfer, or about to join it."""
    ports = {link.laddr.port for link in sender.net_connections("tcp")}
    links = engine.net_connections("tcp")
    return any(link.raddr and link.raddr.port in ports for link in links)


def member_of(engine: psutil.Process, victim: Victim) -> psutil.Process:
    """The process of an engine, or the server below it."""
    if victim == "process":
        return engine
    children = engine.children(recursive=True)
    return next(one for one in children if one.name().startswith("sglang::"))
