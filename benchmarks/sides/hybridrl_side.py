"""Our side of the race: the training loop as ``python -m hybridrl.main`` runs it, Ray and all.

Only the recorder differs: the real one writes its files and TensorBoard events as always, and then
the step is reported to the parent process, which says when to go on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.sides.records import train_with
from hybridrl.metrics import Metrics
from hybridrl.run.record import RunFolder

_REPORTED = {
    "generate": "time/generate_s",
    "update": "time/update_s",
    "response_tokens": "length/response_tokens/mean",
    "prompt_tokens": "length/prompt_tokens/mean",
    "reward": "reward/mean",
    "entropy": "policy/entropy_nats/mean",
}


class Gate:
    """Reports each step to the parent, and waits after the last one allowed."""

    def __init__(self, parent: Connection, num_warmup_steps: int) -> None:
        self._parent = parent
        self._num_allowed = num_warmup_steps
        self._steps: list[dict[str, float]] = []
        self._began = time.perf_counter()

    def end_step(self, metrics: Metrics) -> None:
        """Report; the step ends here. Leaves the run when the parent allows 0 steps."""
        step_s = time.perf_counter() - self._began
        reported = {key: metrics[name].value for key, name in _REPORTED.items()}
        self._steps.append({"step": step_s, **reported})
        if len(self._steps) == self._num_allowed:
            self._parent.send(self._steps)
            self._steps = []
            self._num_allowed = self._parent.recv()
            if not self._num_allowed:
                raise SystemExit(0)
        self._began = time.perf_counter()


@dataclass(frozen=True)
class GatedRecord(RunFolder):
    """Records as usual, all of it, and passes the gate after each step."""

    gate: Gate = field(kw_only=True)

    def record(self, step: int, metrics: Metrics) -> None:
        """Record and report."""
        super().record(step, metrics)
        self.gate.end_step(metrics)


def main() -> None:
    """Train under the parent's control until it says 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON: model, rows, sizes and optimizer")
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    parser.add_argument("--connection", type=int, required=True, help="file descriptor")
    options = parser.parse_args()
    settings = json.loads(options.settings)
    parent = Connection(options.connection)  # its end is the process's: an error is told by then
    gate = Gate(parent, settings["num_warmup_steps"])
    train_with(GatedRecord, [*overrides(settings), *options.overrides], gate=gate)


def overrides(settings: dict[str, Any]) -> list[str]:
    """Say the same to hybridrl as trl_side says to GRPOTrainer."""
    return [
        *("model=hf_folder", f"model.path={settings['model']}", "rollout.temperature=1.0"),
        *("data=files", f"data.train_files=[{settings['rows']}]", "data.use_chat_template=false"),
        *("data.shuffle=false", "data.max_prompt_tokens=24"),
        f"trainer.num_steps={settings['num_steps']}",
        f"trainer.num_prompts_per_step={settings['num_prompts']}",
        f"rollout.num_responses_per_prompt={settings['num_responses']}",
        f"rollout.max_response_tokens={settings['max_response_tokens']}",
        *(f"trainer.run_dir={settings['scratch']}/run", "trainer.overwrite=true"),
        *("eval.every_num_steps=0", "tracking.live=off"),
        *(f"actor.optimizer.{key}={value}" for key, value in settings["optimizer"].items()),
    ]


if __name__ == "__main__":
    main()
