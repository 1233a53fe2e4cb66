"""A run from its configuration to its exported model. Ray is connected."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from hybridrl.checkpoint.store import RunFingerprint, RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.trainer import TrainerConfig
from hybridrl.data.rows import SamplerState
from hybridrl.json_text import to_json_text
from hybridrl.metrics import Metrics
from hybridrl.models.load import require_usable_model
from hybridrl.run.after_checkpoint import open_function
from hybridrl.run.checkpoints import (
    Checkpointer,
    Saver,
    check_resumable,
    checkpoint_store,
    newest_step,
    run_fingerprint,
)
from hybridrl.run.launch import with_restarts
from hybridrl.run.loops import Training, open_rl
from hybridrl.run.modes.offline import open_offline
from hybridrl.run.record import RunFolder
from hybridrl.run.starter import find_model
from hybridrl.run.workers import start_workers
from hybridrl.serving.finished_groups import GroupSaver
from hybridrl.trainer.loop import Loop
from hybridrl.trainer.policy import Learner

log = logging.getLogger(__name__)


def train(config: ExperimentConfig, *, record: RunFolder) -> None:
    """Train as ``mode`` says, or resume the run in the folder.

    All errors in data, model files, tokenizer, reward function and the checkpoint to resume from
    appear before a worker starts. Lost workers are started again.
    """
    folder = find_model(config, record)
    record.live.phase("load data")
    require_usable_model(folder)
    opened: AbstractContextManager[Training] = (
        nullcontext(open_offline(config, folder, record.live, record.record))
        if config.offline
        else open_rl(config, folder, record)
    )
    with opened as training:
        origin = run_fingerprint(config, folder)
        check_resumable(config, origin, rows=training.stream.state())
        record.live.num_steps = training.config.num_steps
        with_restarts(
            _Run(training, folder, origin, record).attempt,
            explain=record.explain,
            newest_step=lambda: newest_step(config),
            max_in_a_row=config.checkpoint.max_restarts,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    training: Training
    model_folder: Path
    origin: RunFingerprint
    record: RunFolder

    def attempt(self) -> None:
        """Start workers, resume from the newest checkpoint, run to the end, and export."""
        config, record = self.training.config, self.record
        record.live.phase("start workers")
        with start_workers(config, self.model_folder) as workers:
            loop = self.training.loop_of(workers)
            groups = [cast(Profiled, group) for group in workers.values()]
            groups += [] if workers.servers is None else [workers.servers]
            loop = replace(loop, take_step=_with_profiles(loop.take_step, groups, config.trainer))
            with loop.interrupt.listening():  # until everything is written
                savers = {role: cast(Saver, group) for role, group in workers.items()}
                if config.samples_ahead and workers.servers is not None:
                    rows = self.training.stream.state().fingerprint
                    facts = to_json_text([self.origin.recipe, self.origin.fingerprints, rows])
                    origin = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
                    savers["groups"] = GroupSaver(workers.servers, origin=origin)
                has_learnt = self._run_resumable(loop, savers)
                if config.exports_model:
                    record.live.phase("export")
                    actor = cast(Learner, workers["actor"])
                    target = record.folder.absolute()  # ranks have a working folder of their own
                    _export(actor.export_hf, target / "hf", is_new=has_learnt)
                    if config.lora.enabled:
                        _export(actor.export_adapter, target / "adapter", is_new=has_learnt)
        loop.interrupt.raise_if_unfinished()

    def _run_resumable(self, loop: Loop, savers: Mapping[str, Saver]) -> bool:
        """Run ``loop`` from the newest complete checkpoint, or from the beginning, and save.

        Returns whether a step was done: a finished run has no steps left.
        """
        config, record = self.training.config, self.record
        stream, kl, state = self.training.stream, self.training.kl, self.training.advantage_state

        def capture(step: int) -> RunState:
            return RunState(
                step=step,
                sampler=stream.state(),
                num_skipped=loop.guard.num_skipped,
                elapsed_s=record.run_log.elapsed_s,
                log_sizes=record.run_log.sizes(),
                kl_coefficient=None if kl is None else kl.value,
                advantage_state={**state},
            )

        store = checkpoint_store(config)
        checkpointer = Checkpointer(
            shelf=store,
            savers=savers,
            config=config.checkpoint,
            origin=self.origin,
            capture=capture,
            function=open_function(config.checkpoint, timeout_s=config.cluster.call_timeout_s),
        )
        record.live.phase("resume")
        run = checkpointer.restore()
        fingerprint = stream.state().fingerprint
        sampler = SamplerState(0, fingerprint) if run is None else run.sampler
        stream.restore(replace(sampler, fingerprint=fingerprint))  # other rows: accepted earlier
        loop.guard.num_skipped = 0 if run is None else run.num_skipped
        if kl is not None:
            kl.restore(None if run is None else run.kl_coefficient)
        state.clear()
        state.update({} if run is None else run.advantage_state)
        record.rewind(run)
        num_done = 0 if run is None else run.step
        if run is not None:
            log.info("going on from the checkpoint of step %d", num_done)
        with checkpointer.completed_after_errors():
            loop = replace(
                loop,
                save=checkpointer.after_step,
                note_evaluation=checkpointer.note_evaluation,
                first_step=num_done + 1,
            )
            return loop.run() > num_done


def _export(write: Callable[[Path], object], folder: Path, *, is_new: bool) -> None:
    """Write a folder, unless it exists and the model has not learned since."""
    if folder.is_dir():
        if not is_new:
            return
        shutil.rmtree(folder)
    write(folder)


class Profiled(Protocol):
    """A worker group of ``CheckpointedWorker``, or the rollout servers."""

    def profile(self, stem: Path | None) -> object:
        """Profile from here on, a file that begins with ``stem`` each process; None: write them."""
        ...


def _with_profiles(
    take_step: Callable[[int], Metrics], groups: Collection[Profiled], trainer: TrainerConfig
) -> Callable[[int], Metrics]:
    """Return ``take_step`` that profiles the steps of ``trainer.profile_steps``."""
    folder = Path(trainer.run_dir).absolute() / "profile"  # ranks have a folder of their own

    def profiled(step: int) -> Metrics:
        if step not in trainer.profile_steps:
            return take_step(step)
        for group in groups:
            group.profile(folder / f"step-{step}")
        metrics = take_step(step)
        for group in groups:
            group.profile(None)
        log.info("profile of step %d, for https://ui.perfetto.dev: %s", step, folder)
        return metrics

    return profiled
