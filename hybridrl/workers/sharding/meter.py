"""Peak memory of nested scopes: torch's count on CUDA, the process's own on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from hybridrl.metrics import Max, Metrics, merge
from hybridrl.workers import profiler

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = b"5"  # proc(5): sets VmHWM to the present size; costs 12 us and touches no page
_KIB = 1024


class PeakMeter:
    """Measures the peak memory within each of several nested scopes.

    On CUDA that is the memory that torch's allocator handed out. On a CPU it is the resident memory
    of the process above its size when the meter was made, so make it right before the engines. If
    the kernel cannot reset its own peak (no /proc, or a sandbox), memory is read when a scope
    begins and ends: peaks in between are missed, and figures are too low.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the process's present memory as the zero of a CPU's figures."""
        self.device = device
        is_cuda = device.type == "cuda"
        self._take_peak = partial(_take_cuda_peak, device) if is_cuda else _resident_peak()
        self._trims = not is_cuda
        self._is_settled = False
        self._trimmed: set[str] = set()
        self._open: list[tuple[str, int]] = []
        self._metrics: Metrics = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block's peak as ``memory/<name>_peak_bytes/max``; a profile names it."""
        if self._trims and self._is_settled and not self._open and name not in self._trimmed:
            # malloc keeps freed memory, so a scope looks as large as the largest one before it.
            # Once for each scope: to give back and take again costs up to half a second per GB.
            self._trimmed.add(name)
            with suppress(AttributeError, OSError):  # without glibc
                ctypes.CDLL(None).malloc_trim(0)
        self._look()
        self._open.append((name, 0))
        try:
            with profiler.of_process.named(name):
                yield
        finally:
            self._look()
            _, peak = self._open.pop()
            self._metrics = merge([self._metrics, {f"memory/{name}_peak_bytes/max": Max(peak)}])

    def settle(self) -> None:
        """All lasting memory is allocated now: measure each scope once on its own."""
        self._is_settled = True

    def take_metrics(self) -> Metrics:
        """Return the peaks of the scopes that closed since the last call, and reset them."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _look(self) -> None:
        """Count the peak since the last reading for every open scope."""
        peak = self._take_peak()
        self._open = [(name, max(before, peak)) for name, before in self._open]


def _take_cuda_peak(device: torch.device) -> int:
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _resident_peak() -> Callable[[], int]:
    """Return a function for the process's peak since its last call, in bytes above now."""
    field = b"VmHWM:" if _reset_peak() else b"VmRSS:"
    start = _read_status(field)

    def take() -> int:
        peak = _read_status(field)
        _reset_peak()
        return max(0, peak - start)

    return take


def _reset_peak() -> bool:
    """Set the kernel's peak of this process to its present size, if the kernel can."""
    try:
        with _CLEAR_REFS.open("wb", buffering=0) as file:
            return file.write(_RESET_PEAK) == len(_RESET_PEAK)
    except OSError:
        return False


def _read_status(field: bytes) -> int:
    """Read a field of /proc/self/status in bytes; 0 if it does not exist."""
    try:
        _, _, after = _STATUS.read_bytes().partition(field)
    except OSError:
        return 0
    return int(after.split(maxsplit=1)[0]) * _KIB if after else 0
