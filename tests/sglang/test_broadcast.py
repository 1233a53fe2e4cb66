"""Runs whose weights are broadcast to servers, of which one is killed in the middle of a sync."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tests.end_to_end.small import SMALL, VARIED
from tests.sglang.test_run import processes_of, require_agreement

NUM_STEPS = 6
TIMEOUT_S = 600
"""For two kills, after each of which a server starts beside ranks that wait, on two cores."""

Victim = Literal["server", "process"]

MANY_BUCKETS = (
    *("rollout.bucket_mib=1", "model.starter.hidden_size=256", "model.starter.num_layers=8"),
    "model.starter.intermediate_size=1024",
)
"""Each matrix of the MLPs is a bucket, so that a transfer takes longer than a look at it."""


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.shows("4.12")
@pytest.mark.parametrize("task", [(), ("recipes=calculator_cpu",)], ids=["digits", "agent"])
def test_a_server_killed_in_a_broadcast_is_replaced_alone(
    tmp_path: Path, task: tuple[str, ...]
) -> None:
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_in_broadcasts, tmp_path, ("server", "process"), has_ended)
        try:
            lines = require_agreement(
                tmp_path,
                *(*task, "serving=own", "serving.weights=broadcast", *SMALL, *MANY_BUCKETS, VARIED),
                *("eval.every_num_steps=0", "checkpoint.every_num_steps=0"),
                "cluster.call_timeout_s=300",
                num_steps=NUM_STEPS,
                timeout_s=TIMEOUT_S,
            )
        finally:
            has_ended.set()
    assert killing.result() == 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("an update of rollout engines is tried again") == 2
    for name, count in (("lost", 2), ("replaced", 2)):
        assert sum(line.get(f"rollout/{name}_engines", 0.0) for line in lines) == count
    assert sum(line.get("rollout/repeated_requests", 0.0) for line in lines) == 0


def kill_in_broadcasts(folder: Path, victims: Sequence[Victim], has_ended: threading.Event) -> int:
    """Kill a member of a transfer to both engines, once for each kind; return how many were."""
    num_kills = 0
    senders: set[int] = set()
    while num_kills < len(victims) and not has_ended.wait(0.002):
        with suppress(psutil.NoSuchProcess):
            for sender in senders_of(folder):
                receivers = receivers_of(sender, folder)
                if len(receivers) == 2 and sender.pid not in senders:
                    senders.add(sender.pid)  # which ends, as no other does
                    member_of(receivers[-1], victims[num_kills]).kill()
                    num_kills += 1
    return num_kills


def senders_of(folder: Path) -> list[psutil.Process]:
    return [one for one in processes_of(folder, "python") if sends(one)]


def sends(process: psutil.Process) -> bool:
    words = process.cmdline()
    return any("weight_sender_child" in word for word in words) and "guard.py" not in str(words)


def receivers_of(sender: psutil.Process, folder: Path) -> list[psutil.Process]:
    """The engines in the group of a transfer: they are connected with the sender."""
    ports = {link.laddr.port for link in sender.net_connections("tcp")}
    return [
        engine
        for engine in processes_of(folder, "ray::EngineProcess")
        if any(link.raddr and link.raddr.port in ports for link in engine.net_connections("tcp"))
    ]


def member_of(engine: psutil.Process, victim: Victim) -> psutil.Process:
    """The process of an engine, or the server below it."""
    if victim == "process":
        return engine
    children = engine.children(recursive=True)
    return next(one for one in children if one.name().startswith("sglang::"))
