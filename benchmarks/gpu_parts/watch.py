"""Peak of device memory, of all processes together, in each stage of a cycle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import TracebackType

import torch

from hybridrl.diagnostics.trace_file import Event

_EVERY_S = 0.002


class DeviceWatch:
    """Samples the device's used memory while it is open: training and engine share the device.

    The engine is a process of its own, so torch's own peak would not see it. On a CPU it sees
    nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[int, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceWatch:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def peaks(self, events: Iterable[Event]) -> dict[str, int]:
        """Return the largest number of used bytes seen within each kind of span.

        A stage shorter than the interval of 2 ms may be missing.
        """
        found: dict[str, int] = {}
        for span in events:
            begin_ns, end_ns = 1000 * span["ts"], 1000 * (span["ts"] + span["dur"])
            within = [used for at, used in self._samples if begin_ns <= at <= end_ns]
            if within:
                found[span["name"]] = max(found.get(span["name"], 0), *within)
        return found

    def _sample(self) -> None:
        while not self._end.wait(_EVERY_S):
            free, total = torch.cuda.mem_get_info(self._device)
            self._samples.append((time.time_ns(), total - free))


def free_after_all(device: torch.device) -> int | None:
    """Return the free bytes once nothing runs and nothing is cached; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
