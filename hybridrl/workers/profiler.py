"""A profile of this process by torch's profiler: what it computes and launches, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MAX_MEMORY_EVENTS = 200_000


class Profiler:
    """Profiles the calls between ``begin`` and ``end``; in a process with fused workers, once."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._stem = Path()

    def begin(self, stem: Path) -> None:
        """Profile this thread, and its device, for files of this stem. Twice is a no-op."""
        if self._profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)
        self._stem = stem
        self._profile = profile(activities=activities)
        self._profile.start()

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Give the block a name in the profile, and on CUDA as a range of NVTX, for Nsight."""
        is_seen = self._profile is not None and torch.cuda.is_available()
        with record_function(name), torch.cuda.nvtx.range(name) if is_seen else nullcontext():
            yield

    def end(self) -> None:
        """Write ``STEM.json.gz``, and of a GPU's memory ``STEM.memory.pickle``. Twice is a no-op.

        The first is for Perfetto, the second for https://docs.pytorch.org/memory_viz.
        """
        if self._profile is None:
            return
        self._profile.stop()
        stem = self._stem
        stem.parent.mkdir(parents=True, exist_ok=True)
        staged = stem.with_name(f".{stem.name}.json.gz")
        self._profile.export_chrome_trace(str(staged))
        staged.replace(stem.with_name(f"{stem.name}.json.gz"))
        self._profile = None
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(  # type: ignore[no-untyped-call]
                str(stem.with_name(f"{stem.name}.memory.pickle"))
            )
            torch.cuda.memory._record_memory_history(enabled=None)


of_process = Profiler()
