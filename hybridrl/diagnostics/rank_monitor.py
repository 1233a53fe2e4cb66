"""Monitors the processes of a group's ranks from the driver: state, stacks, exit status.

Apart from ``process_report``, which the supervisor of a run reads without Ray.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.diagnostics.process_report import (
    NO_MEMORY,
    UNREACHABLE,
    MonitoredRank,
    RankReport,
    read_ranks,
)

_STACKS_WAIT_S = 2.0
_NODE_WAIT_S = 6.0
_EXIT_WAIT_S = 2.0
_KILL_WAIT_S = 2.0

# struct pidfd_info of linux/pidfd.h, and the request for the exit status in it (Linux 6.15).
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO.size << 16 | 0xFF << 8 | 11


class RankMonitor:
    """Holds the processes of a group's ranks, in rank order, and reports on them when asked.

    Those on the driver's machine are held by a kernel handle from now on, which has their exit
    status and never means another process.
    """

    def __init__(self, ranks: Sequence[MonitoredRank] = ()) -> None:
        self._ranks = list(ranks)
        driver_node = ray.get_runtime_context().get_node_id() if ranks else ""
        # The file too: a driver beside the cluster (Ray client) has no node of its own.
        self._local = {
            rank.rank
            for rank in ranks
            if rank.node_id == driver_node and Path(f"{rank.files.stem}.activity").exists()
        }
        self._handles: dict[int, int] = {}
        for rank in ranks:
            if rank.rank in self._local:
                with suppress(OSError):  # dead already
                    self._handles[rank.rank] = os.pidfd_open(rank.files.pid)

    def examine(self) -> list[RankReport]:
        """Report on all ranks; takes 0.2 s on one machine, and never more than 10 s.

        A rank whose machine does not answer in time is reported as unreachable.
        """
        elsewhere: dict[str, list[MonitoredRank]] = defaultdict(list)
        for rank in self._ranks:
            if rank.rank not in self._local:
                elsewhere[rank.node_id].append(rank)
        asked = {_ask(node_id, ranks): ranks for node_id, ranks in elsewhere.items()}
        local = [rank for rank in self._ranks if rank.rank in self._local]
        reports = [self._with_exit(report) for report in read_ranks(local, wait_s=_STACKS_WAIT_S)]
        reports += _answers(asked)
        return sorted(reports, key=lambda report: report.rank)

    def end(self) -> None:
        """Make sure that the ranks on this machine are gone, and release them. Twice is a no-op.

        Ray asks a process to exit, and gives a process that a signal has stopped 5 s to obey. If it
        is killed earlier, Ray takes an orderly end for a crash, and reports that to the user.
        """
        deadline = time.monotonic() + _EXIT_WAIT_S
        for handle in self._handles.values():
            _wait_for_exit(handle, max(0.0, deadline - time.monotonic()))
        for handle in self._handles.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            _wait_for_exit(handle, _KILL_WAIT_S)
            os.close(handle)
        self._handles.clear()

    def _with_exit(self, report: RankReport) -> RankReport:
        """Replace the guess at how a process ended by the kernel's exit status, if there is one."""
        handle = self._handles.get(report.rank)
        status = None if handle is None or not report.is_gone else _exit_status(handle)
        if status is None:
            return report
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return replace(report, exit=f"exit code {code}")
        hint = f"; {report.exit}" if NO_MEMORY in report.exit else ""
        how = f"killed by signal {-code} ({signal.Signals(-code).name}){hint}"
        return replace(report, exit=how)


def _wait_for_exit(handle: int, wait_s: float) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll(wait_s * 1000)


def _ask(node_id: str, ranks: Sequence[MonitoredRank]) -> Any:  # noqa: ANN401 - Ray's reference
    task = ray.remote(num_cpus=0, max_retries=0)(read_ranks)
    on_that_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(scheduling_strategy=on_that_node).remote(ranks, wait_s=_STACKS_WAIT_S)


def _answers(asked: Mapping[Any, Sequence[MonitoredRank]]) -> list[RankReport]:
    if not asked:
        return []
    done, pending = ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_WAIT_S)
    reports: list[RankReport] = []
    for ref in done:
        try:
            reports += ray.get(ref, timeout=_NODE_WAIT_S / len(done))
        except RayError as error:
            reason = (str(error).splitlines() or [""])[0]
            reports += _unreachable(asked[ref], f"{UNREACHABLE}: {reason}")
    for ref in pending:
        ray.cancel(ref, force=True)
        reason = f"{UNREACHABLE}: its node did not answer within {_NODE_WAIT_S:g} s"
        reports += _unreachable(asked[ref], reason)
    return reports


def _unreachable(ranks: Sequence[MonitoredRank], state: str) -> list[RankReport]:
    return [
        RankReport(rank=rank.rank, host=rank.host, pid=rank.files.pid, state=state)
        for rank in ranks
    ]


def _exit_status(handle: int) -> int | None:
    """Return the wait status of a process that has ended; None if this kernel does not give it."""
    question = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, question)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(question)
    return status if mask & _PIDFD_INFO_EXIT else None
