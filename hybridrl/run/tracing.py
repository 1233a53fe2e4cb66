"""Gathers what the driver and all ranks recorded, and writes it down while the run goes on."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridrl.diagnostics import trace
from hybridrl.run.trace_file import TraceFile
from hybridrl.single_controller.spans import SpanCollector

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LAST_WAIT_S = 2.0
_COUNTED = ("reward/mean", "eval/reward/mean", "policy/entropy_nats/mean")
_COUNTED_AREAS = ("throughput", "memory")


class Tracing:
    """The trace of one run. What cannot be written costs a warning and never the run.

    Ranks are asked right after a step, while the driver keeps its records, and answer before the
    next one; the answers are picked up a step later. At most once a second: a step may be short.
    """

    def __init__(self, file: TraceFile) -> None:
        """Write to ``file``, which the caller opened; ``close`` closes it."""
        self._file = file
        self._driver = f"driver on {socket.gethostname()}"
        self._groups: list[SpanCollector] = []
        self._next_s = 0.0
        self._is_broken = False
        self._write(trace.take())

    @classmethod
    def begin(cls, folder: Path) -> Tracing | None:
        """Begin the trace of a run folder; None, with a warning, if it cannot be written."""
        try:
            return cls(TraceFile(folder))
        except OSError as error:
            log.warning("no trace is kept: %s; tracking.trace=false keeps quiet about it", error)
            return None

    @contextmanager
    def watching(self, ranks: SpanCollector) -> Iterator[None]:
        """Fetch what these ranks record, until the end of the ``with``."""
        self._groups.append(ranks)
        try:
            yield
        finally:
            self._groups.remove(ranks)
            self._pick_up(ranks, wait_s=_LAST_WAIT_S)  # what was asked before
            ranks.ask()
            self._pick_up(ranks, wait_s=_LAST_WAIT_S)

    def step(self, values: Mapping[str, float]) -> None:
        """A step is over: keep its counters, write what came, ask for what is new."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        self._write(trace.take(), values)
        for ranks in self._groups:
            self._pick_up(ranks, wait_s=0.0)
            ranks.ask()

    def close(self) -> None:
        """Write the driver's last spans and end the file."""
        self._write(trace.take())
        try:
            self._file.close()
        except OSError as error:
            self._give_up(error)

    def _pick_up(self, ranks: SpanCollector, *, wait_s: float) -> None:
        for name, harvest in ranks.collect(wait_s=wait_s):
            if not self._is_broken:
                try:
                    self._file.add(name, harvest)
                except OSError as error:
                    self._give_up(error)

    def _write(self, harvest: trace.SpanBatch, values: Mapping[str, float] | None = None) -> None:
        if self._is_broken:
            return
        counters = {name: value for name, value in (values or {}).items() if _is_counted(name)}
        try:
            self._file.add(self._driver, harvest)
            self._file.count(self._driver, at_ns=harvest.at_ns, values=counters)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._is_broken:
            log.warning("the trace ends here: %s", error)
        self._is_broken = True


def _is_counted(name: str) -> bool:
    return name in _COUNTED or name.partition("/")[0] in _COUNTED_AREAS
