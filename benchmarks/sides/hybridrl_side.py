"""Our side of the race: the training loop as ``python -m hybridrl.main`` runs it, Ray and all.

Only the recorder differs: the real one writes its files and TensorBoard events as always, and then
the step is reported to the parent process, which says when to go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from benchmarks.sides.gate import Gate, open_gate
from hybridrl import env
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


@dataclass(frozen=True)
class GatedRecord(RunFolder):
    """Records as usual, all of it, and passes the gate after each step."""

    gate: Gate = field(kw_only=True)

    def record(self, step: int, metrics: Metrics) -> None:
        super().record(step, metrics)
        reported = {key: metrics[name].value for key, name in _REPORTED.items()}
        if not self.gate.end_step({"step": self.gate.step_s, **reported}):
            raise SystemExit(0)


def main() -> None:
    gate, settings, words = open_gate()
    composed = compose([*overrides(settings), *words])
    config = load_config(composed)
    for name, value in env.process_environment(config.cluster.num_threads_per_rank).items():
        env.set_default(name, value)
    with (
        open_record(config, resolved_yaml=yaml.safe_dump(composed)) as opened,
        ray_cluster(config.cluster),
    ):
        train(config, record=GatedRecord(opened.run_log, opened.live, gate=gate))


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
