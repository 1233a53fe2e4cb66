"""Steps of one side of benchmarks/against_trl.py; the parent process says when to go on.

TRL's side runs in TRL's own environment: this file imports nothing of hybridrl.
"""

from __future__ import annotations

import argparse
import json
import time
from multiprocessing.connection import Connection
from typing import Any


class Gate:
    """Reports each step to the parent, and waits after the last one allowed."""

    def __init__(self, parent: Connection, num_warmup_steps: int) -> None:
        self._parent = parent
        self._num_allowed = num_warmup_steps
        self._steps: list[dict[str, float]] = []
        self._began = time.perf_counter()

    @property
    def step_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began

    def end_step(self, step: dict[str, float]) -> bool:
        """Report; the step ends here. Returns False once the parent allows no further step."""
        self._steps.append(step)
        if len(self._steps) == self._num_allowed:
            self._parent.send(self._steps)
            self._steps = []
            self._num_allowed = self._parent.recv()
        self._began = time.perf_counter()
        return self._num_allowed > 0


def open_gate() -> tuple[Gate, dict[str, Any], list[str]]:
    """Read the command line of a side; returns settings and further words, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", help="JSON: model, rows, sizes and optimizer")
    parser.add_argument("words", nargs="*", help="overrides, or key=JSON of GRPOConfig")
    parser.add_argument("--connection", type=int, required=True, help="file descriptor")
    options = parser.parse_args()
    settings = json.loads(options.settings)
    parent = Connection(options.connection)  # its end is the process's: an error is told by then
    return Gate(parent, settings["num_warmup_steps"]), settings, options.words
