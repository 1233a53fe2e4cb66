"""The user's function after each checkpoint: a service of ``processes/child.py``, and its caller.

It has a process of its own: it may be slow, hang or crash, and training continues meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from hybridrl.checkpoint.store import Checkpoint
from hybridrl.config.functions.parts import CHECKPOINT_FUNCTION
from hybridrl.config.trainer import CheckpointConfig
from hybridrl.processes.child import Emit, Message, Service, load_function
from hybridrl.processes.pool import CallFailed, Child

log = logging.getLogger(__name__)


class CheckpointFunction:
    """``checkpoint.function``, called with one complete checkpoint at a time; close it.

    No failure of it ends the run: the log names it, and the checkpoint stays as it is.
    """

    def __init__(self, spelled: str, *, timeout_s: float) -> None:
        """Start nothing yet."""
        path, _, name = spelled.rpartition(":")
        inputs = CHECKPOINT_FUNCTION.read(spelled).inputs
        self._name = f"checkpoint.function={spelled}"
        self._child = Child(
            __name__,
            {"path": path, "name": name, "inputs": inputs},
            names=[self._name],
            timeout_s=timeout_s,
        )
        self._thread: Thread | None = None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Call it; the call before must have ended, see `wait`."""
        self._thread = Thread(target=self._call, args=(checkpoint,), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the call under way: its deadline bounds this."""
        if self._thread is not None:
            self._thread.join()

    def close(self, *, waits: bool) -> None:
        """End the process, perhaps after the call under way."""
        try:
            if waits:
                self.wait()
        finally:
            self._child.end()  # the call that is still under way fails
            self.wait()
            self._child.close()

    def _call(self, checkpoint: Checkpoint) -> None:
        folder, step = checkpoint.folder, checkpoint.manifest.run.step
        try:
            self._child.start()
            with self._child.call({"folder": str(folder), "step": step}, max_bytes=1024) as answer:
                answer()
        except CallFailed as failure:
            log.warning(
                "%s failed after step %d: %s. The checkpoint %s is complete, and the run continues",
                *(self._name, step, failure, folder),
            )


def open_function(config: CheckpointConfig, *, timeout_s: float) -> CheckpointFunction | None:
    """Return the function that the configuration names, if it names one."""
    name = config.function
    return None if name is None else CheckpointFunction(name, timeout_s=timeout_s)


def load(path: str, name: str, inputs: Sequence[str]) -> tuple[Service, None]:
    """Load the function; return its service. ``inputs`` are those that it asks for."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    function = load_function(path, name)

    def call(message: Message, emit: Emit) -> None:
        values = {"folder": Path(message["folder"]), "step": message["step"]}
        function(**{name: values[name] for name in inputs})
        emit()

    return call, None
