"""A run from its configuration to its exported model. Ray is connected."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

from hybridrl.checkpoint.store import RunFingerprint, RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.rows import SamplerState
from hybridrl.models.load import require_usable_model
from hybridrl.run.checkpoints import Checkpointer, Saver
from hybridrl.run.loops import Training, open_rl
from hybridrl.run.modes.offline import OPEN_OFFLINE
from hybridrl.run.record import RunFolder
from hybridrl.run.resume import check_resumable, checkpoint_store, newest_step, run_fingerprint
from hybridrl.run.starter import find_model
from hybridrl.run.supervise import with_restarts
from hybridrl.run.workers import start_workers
from hybridrl.trainer.loop import Loop
from hybridrl.trainer.policy import Learner

log = logging.getLogger(__name__)


def train(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Train as ``mode`` says, or resume the run in the folder.

    All errors in data, model files, tokenizer, reward function and the checkpoint to resume from
    appear before a worker starts. Lost workers are started again.
    """
    folder = find_model(config, record)
    record.phase("load data")
    require_usable_model(folder)
    opens = OPEN_OFFLINE.get(config.mode)
    opened: AbstractContextManager[Training] = (
        open_rl(config, folder, record)
        if opens is None
        else nullcontext(opens(config, folder, record))
    )
    with opened as training:
        origin = run_fingerprint(config, folder)
        check_resumable(config, origin, rows=training.stream.state())
        record.live.num_steps = training.config.num_steps
        with_restarts(
            lambda: _train_once(training.config, folder, training, origin=origin, record=record),
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
    """Start workers, resume from the newest checkpoint, run to the end, and export."""
    record.phase("start workers")
    with start_workers(config, folder) as workers:
        loop = training.loop_of(workers)
        savers = {role: cast(Saver, group) for role, group in workers.items()}
        with loop.interrupt.listening():  # until everything is written
            has_learnt = _run_resumable(
                config, loop, training, savers, origin=origin, record=record
            )
            if config.exports_model:
                record.phase("export")
                actor = cast(Learner, workers["actor"])
                target = record.folder.absolute()  # ranks have a working folder of their own
                _export(actor.export_hf, target / "hf", is_new=has_learnt)
                if config.lora.enabled:
                    _export(actor.export_adapter, target / "adapter", is_new=has_learnt)
    loop.interrupt.raise_if_unfinished()


def _export(write: Callable[[Path], object], folder: Path, *, is_new: bool) -> None:
    """Write a folder, unless it exists and the model has not learned since."""
    if folder.is_dir():
        if not is_new:
            return
        shutil.rmtree(folder)
    write(folder)


def _run_resumable(
    config: ExperimentConfig,
    loop: Loop,
    training: Training,
    savers: Mapping[str, Saver],
    *,
    origin: RunFingerprint,
    record: RunFolder,
) -> bool:
    """Run ``loop`` from the newest complete checkpoint, or from the beginning, and save.

    Returns whether a step was done: a finished run has no steps left.
    """
    stream, kl = training.stream, training.kl

    def capture(step: int) -> RunState:
        return RunState(
            step=step,
            sampler=stream.state(),
            num_skipped=loop.guard.num_skipped,
            elapsed_s=record.run_log.elapsed_s,
            log_sizes=record.run_log.sizes(),
            kl_coefficient=None if kl is None else kl.value,
        )

    checkpointer = Checkpointer(
        checkpoint_store(config), savers, config=config.checkpoint, origin=origin, capture=capture
    )
    record.phase("resume")
    run = checkpointer.restore()
    fingerprint = stream.state().fingerprint
    sampler = SamplerState(0, fingerprint) if run is None else run.sampler
    stream.restore(replace(sampler, fingerprint=fingerprint))  # other rows were accepted earlier
    loop.guard.num_skipped = 0 if run is None else run.num_skipped
    if kl is not None:
        kl.restore(None if run is None else run.kl_coefficient)
    record.rewind(run)
    num_done = 0 if run is None else run.step
    if run is not None:
        log.info("going on from the checkpoint of step %d", num_done)
    with checkpointer.completed_after_errors():
        loop = replace(loop, save=checkpointer.after_step, first_step=num_done + 1)
        return loop.run() > num_done
