"""TensorBoard event files, written without threads and without importing torch's writer.

The only module that imports tensorboard. Its own writer reports a full disk only at a later call,
and imports TensorFlow if that is installed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class TensorBoardTracker:
    """Appends an event per step to a file in ``<run>/tensorboard``; OSError if the disk is full."""

    def __init__(self, folder: Path, *, project: str, settings: Mapping[str, object]) -> None:
        """Create the file. ``project`` and ``settings`` are not written to it.

        Raises:
            OSError: it cannot be written.
        """
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        # Unbuffered: an error is raised in the step that caused it, and a crash loses nothing.
        self._file = (folder / name).open("wb", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one event."""
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """Write an event that makes readers drop events after ``step``, in earlier files too."""
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


open_tracker = TensorBoardTracker
