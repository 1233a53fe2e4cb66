"""A run from its configuration to its exported model. Ray is connected."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

from hybridrl.checkpoint.manifest import RunFingerprint
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.models.folder import require_usable_model
from hybridrl.run.checkpoints import Saver
from hybridrl.run.loops import Training, open_rl, open_sft
from hybridrl.run.record import RunFolder
from hybridrl.run.restarts import with_restarts
from hybridrl.run.resume import check_resumable, newest_step, run_fingerprint, run_resumable
from hybridrl.run.starter import find_model
from hybridrl.run.workers import start_workers
from hybridrl.trainer.policy import Learner


def train(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Train as ``mode`` says, or go on where the run in the folder ended.

    Everything that can be wrong with data, model files, tokenizer, reward function and the
    checkpoint to go on from shows before a worker starts. Lost workers are started again.

    Raises:
        CheckpointError: there is a checkpoint, and it is of another run.
        RunStopped: a signal ended the run before its last step.
    """
    folder = find_model(config, record)
    record.phase("load data")
    require_usable_model(folder)
    open_training = open_sft if config.mode == "sft" else open_rl
    with open_training(config, folder, record) as training:
        origin = run_fingerprint(config, folder)
        check_resumable(config, origin, rows=training.stream.state())
        with_restarts(
            lambda: _train_once(config, folder, training, origin=origin, record=record),
            explain=record.explain,
            newest_step=lambda: newest_step(config),
            max_in_a_row=config.checkpoint.max_restarts,
        )


def _train_once(
    config: ExperimentConfig,
    folder: Path,
    training: Training,
    *,
    origin: RunFingerprint,
    record: RunFolder,
) -> None:
    """Start workers, go on from the newest checkpoint to the end, and export."""
    record.phase("start workers")
    with start_workers(config, folder, record=record) as workers:
        loop = training.loop_of(workers)
        with loop.interrupt.listening():  # until all is written
            has_learnt = run_resumable(
                config,
                loop,
                {role: cast(Saver, group) for role, group in workers.items()},
                origin=origin,
                stream=training.stream,
                record=record,
            )
            training.finish()
            if config.exports_model:
                record.phase("export")
                actor = cast(Learner, workers["actor"])
                target = record.folder.absolute()  # ranks have a working folder of their own
                _export(actor.export_hf, target / "hf", is_new=has_learnt)
                if config.lora.enabled:
                    _export(actor.export_adapter, target / "adapter", is_new=has_learnt)
    loop.interrupt.raise_if_unfinished()


def _export(write: Callable[[Path], object], folder: Path, *, is_new: bool) -> None:
    """Write a folder, unless it is there and nothing was learnt since."""
    if folder.is_dir():
        if not is_new:
            return
        shutil.rmtree(folder)
    write(folder)
