"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridrl.diagnostics import trace
from hybridrl.metrics import Mean, Metrics


class Clock:
    """Times the phases of one step; ``on_phase`` hears of each as it begins."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._begin = time.perf_counter()
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time one phase; one that comes again adds to its seconds."""
        if self._on_phase is not None:
            self._on_phase(phase)
        begin = time.perf_counter()
        try:
            with trace.span(phase):
                yield
        finally:
            took_s = time.perf_counter() - begin
            self._seconds[phase] = self._seconds.get(phase, 0.0) + took_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._begin

    def metrics(self) -> Metrics:
        """Return ``time/<phase>_s`` of each phase and ``time/step_s`` of the step."""
        phases: Metrics = {f"time/{phase}_s": Mean(s) for phase, s in self._seconds.items()}
        return phases | {"time/step_s": Mean(self.elapsed_s)}
