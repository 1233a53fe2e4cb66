"""The sections ``trainer``, ``checkpoint`` and ``tracking``: what the driver does and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import Count, CountOrZero, Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """The driver's loop. Mirrors hydra_configs/trainer/*.yaml key by key."""

    num_steps: Count
    """Steps: one rollout batch and its updates each; one update each where nothing is sampled."""

    num_epochs: Annotated[float, Field(gt=0.0, le=1e6, examples=[1.0])] | None
    """End after this many passes over the rows, if that is before ``num_steps``. Null: the steps
    alone count."""

    num_prompts_per_step: Rows
    """Prompts P per step; P x rollout.num_responses_per_prompt responses are sampled. Modes that
    sample nothing: rows, or preference pairs, over all ranks."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)]
    """Steps between the weights that sample a row's first token and the step that learns from it,
    at most. 0: a step samples, then learns. Above 0 engines on devices of their own sample ahead,
    while the trainer learns; needs ``serving.models`` and a rollout correction."""

    run_dir: str
    """Folder of this run: configuration, log, metrics, samples. A run that is there continues from
    its newest complete checkpoint."""

    overwrite: bool
    """Replace an existing run folder, in place of its continuation."""

    profile_steps: tuple[Count, ...]
    """Steps of which each rank, and each scheduler of SGLang, writes a profile of torch's, into
    ``<run_dir>/profile``. They are slower; a file has some hundred bytes for each operation."""

    export_hf: bool
    """Write the final weights to ``<run_dir>/hf`` as a Hugging Face folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints of a run. Mirrors hydra_configs/checkpoint/*.yaml key by key."""

    every_num_steps: CountOrZero
    """Save every this many steps, after the last step, and when interrupted. 0: never."""

    keep_last: Count
    """Newest checkpoints to keep."""

    keep_best: CountOrZero
    """Further checkpoints to keep: the best by ``checkpoint.best_metric``."""

    best_metric: str | None
    """Metric of a step, by which its checkpoint is judged: ``eval/math/pass_at_8``. Null: the
    highest ``eval/reward/mean``; of preference pairs ``eval/accuracy``; for supervised fine-tuning
    the lowest ``eval/loss_nats``. Low values are good of losses, lengths and truncated shares."""

    accept_changes: bool
    """Resume although recipe, data or tokenizer have changed, or lines of ``metrics.jsonl`` or
    ``samples.jsonl`` are lost; each change is logged."""

    max_restarts: CountOrZero
    """Consecutive restarts of lost workers without a new checkpoint in between."""

    function: str | None
    """``path/to/file.py:function``, called in a process of its own with ``folder`` and ``step`` of
    each complete checkpoint, while training continues. The log names its failures. The next
    checkpoint, and the end of the run, wait for it, for ``cluster.call_timeout_s``. Null: none."""


TRACKER_MODULES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "swanlab": "swanlab",
    "prometheus": "prometheus_client",
}
"""Trackers, and the modules that they need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where metrics go besides ``metrics.jsonl``. Mirrors hydra_configs/tracking/*.yaml."""

    trackers: tuple[
        Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "prometheus"], ...
    ]
    """Trackers to write to; all but tensorboard are extras."""

    project: str
    """Project (wandb, trackio, swanlab) or experiment (mlflow) name."""

    prometheus_address: str
    """``HOST:PORT`` at which the driver answers Prometheus, for that tracker. A host of 0.0.0.0 is
    all of the machine's addresses, a port of 0 any free one, which the log names."""

    function: str | None
    """``path/to/file.py:function``, called with ``step`` and ``metrics`` before the trackers. If it
    returns True, they do not get the step; ``metrics.jsonl`` has all. Null: none."""

    num_samples_per_step: CountOrZero
    """Responses written to samples.jsonl each step, with rewards and text."""

    live: Literal["auto", "table", "lines", "off"]
    """``auto`` shows a live table in a terminal, else plain lines."""

    @property
    def prometheus_host_and_port(self) -> tuple[str, int]:
        """The two parts of ``prometheus_address``; an IPv6 address without brackets."""
        host, _, port = self.prometheus_address.rpartition(":")
        return host.strip("[]"), int(port)
