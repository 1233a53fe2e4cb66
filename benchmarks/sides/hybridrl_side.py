"""Our side of the race: the training loop as ``python -m hybridrl.main`` runs it, Ray and all.

Only the recorder differs: the real one writes its files and TensorBoard events as always, and then
the step is reported to the parent process, which says when to go on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from typing import cast

import yaml

from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.record import RunFolder, open_record
from hybridrl.run.train import train

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

    @classmethod
    def around(cls, record: RunFolder, gate: Gate) -> GatedRecord:
        """Take over a run's record."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(record)}, gate=gate)

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
    composed = compose([*overrides(settings), *options.overrides])
    config = load_config(composed)
    with (
        Connection(options.connection) as parent,
        open_record(config, resolved_yaml=yaml.safe_dump(composed)) as record,
        ray_cluster(config.cluster),
    ):
        gate = Gate(parent, settings["num_warmup_steps"])
        train(config, record=GatedRecord.around(record, gate))


def overrides(settings: dict[str, object]) -> list[str]:
    """Say the same to hybridrl as side_trl says to GRPOTrainer."""
    optimizer = cast("dict[str, float]", settings["optimizer"])
    return [
        "model=hf_folder",
        f"model.path={settings['model']}",
        "data=files",
        f"data.train_files=[{settings['rows']}]",
        "data.use_chat_template=false",
        "data.shuffle=false",
        "data.max_prompt_tokens=24",
        f"trainer.num_steps={settings['num_steps']}",
        f"trainer.num_prompts_per_step={settings['num_prompts']}",
        f"rollout.num_responses_per_prompt={settings['num_responses']}",
        f"rollout.max_response_tokens={settings['max_response_tokens']}",
        "rollout.temperature=1.0",
        f"trainer.run_dir={settings['scratch']}/run",
        "trainer.overwrite=true",
        "eval.every_num_steps=0",
        "tracking.live=off",
        *(f"actor.optimizer.{key}={value}" for key, value in optimizer.items()),
    ]


if __name__ == "__main__":
    main()
