"""Saves a run every few steps, and decides, before Ray starts, whether a folder's run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hybridrl.checkpoint.fingerprint import (
    check_fingerprints,
    check_recipe,
    environment_changes,
    environment_of,
    folder_fingerprints,
    own_fingerprints,
    recipe_of,
)
from hybridrl.checkpoint.store import CheckpointStore, FileEntry, Manifest, RunFingerprint, RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.load import read_stored
from hybridrl.config.trainer import CheckpointConfig
from hybridrl.data.rows import SamplerState
from hybridrl.data.sampler import describe_change
from hybridrl.errors import (
    CheckpointError,
    DataError,
    HybridRLError,
    RemoteCallError,
    RunFolderError,
)
from hybridrl.metrics import Max, Metrics, Sum
from hybridrl.report.run import EVALUATIONS
from hybridrl.run.after_checkpoint import CheckpointFunction
from hybridrl.run.run_folder import lost_lines

log = logging.getLogger(__name__)

_MAX_FAILED_SAVES = 3
_GOOD_IF_LOW = (
    *("loss_nats", "supervised_nats", "_loss", "loss/preference"),
    *("truncated_fraction", "response_tokens/mean"),
)
"""Ends of the names of metrics of which low values are good."""


class Saver(Protocol):
    """A worker group whose engines are saved: one of ``CheckpointedWorker``."""

    def save(self, folder: Path) -> list[None]:
        """Copy to the host, and begin to write."""
        ...

    def collect_saved(self, waits: bool) -> list[FileEntry | None]:  # noqa: FBT001
        """Return the files that each rank wrote; None from ranks that still write."""
        ...

    def find_torn(self, folder: Path, files: Sequence[FileEntry]) -> list[list[str]]:
        """Name the files whose bytes have changed."""
        ...

    def load(self, folder: Path) -> list[None]:
        """Restore the state of the ranks that wrote the folder."""
        ...


@dataclass(frozen=True, slots=True)
class _Unfinished:
    folder: Path
    run: RunState
    score: float | None


@dataclass(kw_only=True, slots=True)
class Checkpointer:
    """Begins a checkpoint after a step, and completes it some steps later.

    Ranks copy their state to the host, which the step waits for, and write it in threads of their
    own. The files are a checkpoint once the manifest is beside them under the final name.
    """

    shelf: CheckpointStore
    savers: Mapping[str, Saver]
    """Worker groups by role; a role is a folder in the checkpoint."""

    config: CheckpointConfig
    origin: RunFingerprint
    """With which a resumed run is compared."""

    capture: Callable[[int], RunState]
    """Returns the driver's state after a step."""

    function: CheckpointFunction | None
    """Called with each complete checkpoint."""

    _unfinished: _Unfinished | None = None
    _num_failed: int = 0

    def after_step(self, step: int, metrics: Metrics, *, is_last: bool) -> Metrics:
        """Finish the checkpoint before if it is written, and begin one if it is time.

        ``metrics`` are of the step, perhaps with an evaluation's. After the last step of the run,
        or before an interruption, wait until all is on the disk. Returns the cost of the save, for
        the next step's metrics.

        Raises:
            CheckpointError: three checkpoints in a row could not be written.
        """
        if not self.config.every_num_steps:
            return {}
        begin = time.perf_counter()
        cost = self._finish(waits=False)
        if step % self.config.every_num_steps == 0 or is_last:
            cost |= self._finish(waits=True)
            self._begin(step, metrics)
        if is_last:
            cost |= self._finish(waits=True)
        return cost | {"time/checkpoint_s": Max(time.perf_counter() - begin)}

    def note_evaluation(self, step: int, metrics: Metrics) -> None:
        """Judge the checkpoint of a step, if it has one, by metrics that came after it."""
        score, unfinished = self._score(metrics), self._unfinished
        if score is None:
            return
        if unfinished is not None and unfinished.run.step == step:
            self._unfinished = replace(unfinished, score=score)
        else:  # the run resumed from it
            self.shelf.judge(step, score)

    @contextmanager
    def completed_after_errors(self) -> Iterator[None]:
        """Complete the checkpoint that is being written, also if the block raises an error.

        A signal that ends the run at once does not wait for ranks: they may be in a long call; nor
        for the user's function.
        """
        waits = False
        try:
            yield
            waits = True
        except Exception:
            waits = True
            try:
                self._finish(waits=True)
            except HybridRLError as failure:  # the run ends with its own error
                log.warning("the checkpoint that was being written is lost: %s", failure)
            raise
        finally:
            if self.function is not None:
                self.function.close(waits=waits)

    def restore(self) -> RunState | None:
        """Restore all workers from the newest complete checkpoint; None if there is none.

        Every byte is compared with its checksum before it is used.

        Raises:
            CheckpointError: it is of another model, or all are incomplete or corrupt.
        """
        self.shelf.discard_unfinished()
        while (checkpoint := self.shelf.newest()) is not None:
            changed: list[str] = []
            for role, saver in self.savers.items():
                files = [f for f in checkpoint.manifest.files if f.name.startswith(f"{role}/")]
                for names in saver.find_torn(checkpoint.folder, files):
                    changed += names
            if not changed:
                for role, saver in self.savers.items():
                    saver.load(checkpoint.folder / role)
                return checkpoint.manifest.run
            log.warning(
                "%s is corrupt: the bytes of %s have changed since they were written; it is set "
                "aside and the checkpoint before it is used",
                *(checkpoint.folder, ", ".join(changed)),
            )
            self.shelf.quarantine(checkpoint.folder)
        return None

    def _begin(self, step: int, metrics: Metrics) -> None:
        try:
            folder = self.shelf.begin(step)
        except OSError as err:
            self._note_failure(f"checkpoint of step {step}: {err}")
            return
        for role, saver in self.savers.items():
            saver.save(folder / role)
        self._unfinished = _Unfinished(folder, self.capture(step), self._score(metrics))

    def _finish(self, *, waits: bool) -> Metrics:
        """Complete the checkpoint that is being written, if all ranks have written."""
        unfinished = self._unfinished
        if unfinished is None:
            return {}
        try:
            files = self._collect(waits=waits)
            if files is None:
                return {}
            manifest = Manifest(
                run=unfinished.run, origin=self.origin, files=files, score=unfinished.score
            )
            checkpoint = self.shelf.commit(unfinished.folder, manifest)
        except (RemoteCallError, OSError) as err:
            if isinstance(err, RemoteCallError) and not isinstance(err.__cause__, CheckpointError):
                raise  # not a disk error: a rank has failed
            self._unfinished = None
            self.shelf.discard_unfinished()  # frees its bytes on a full disk
            self._note_failure(f"checkpoint of step {unfinished.run.step}: {err}")
            return {}
        self._unfinished = None
        self._num_failed = 0
        if self.function is not None:
            self.function.wait()  # before its folder may be deleted
        self.shelf.prune(keep_last=self.config.keep_last, keep_best=self.config.keep_best)
        if self.function is not None:
            self.function.begin(checkpoint)
        return {"memory/checkpoint_bytes": Sum(sum(entry.num_bytes for entry in files))}

    def _collect(self, *, waits: bool) -> tuple[FileEntry, ...] | None:
        files = []
        for role, saver in self.savers.items():
            for entry in saver.collect_saved(waits):
                if entry is None:
                    return None
                files.append(replace(entry, name=f"{role}/{entry.name}"))
        return tuple(files)

    def _score(self, metrics: Metrics) -> float | None:
        """Return how good the policy is by these metrics, higher is better; None if unknown."""
        name = self.config.best_metric
        if name is None:
            name = next((usual for usual, _ in EVALUATIONS if usual in metrics), "")
        sign = -1.0 if name.endswith(_GOOD_IF_LOW) else 1.0
        return sign * metrics[name].value if name in metrics else None

    def _note_failure(self, what: str) -> None:
        self._num_failed += 1
        if self._num_failed == _MAX_FAILED_SAVES:
            raise CheckpointError(
                f"{what}\n{_MAX_FAILED_SAVES} checkpoints in a row could not be written; free "
                "space or repair the disk and give the same command again: it continues from the "
                "last complete checkpoint"
            )
        reason = what.partition("\n")[0]  # the traceback of a rank follows
        log.warning("%s; training continues, the next checkpoint tries again", reason)


def checkpoint_store(config: ExperimentConfig) -> CheckpointStore:
    """Return the checkpoints of the run folder."""
    # Ranks have a working folder of their own.
    return CheckpointStore(Path(config.trainer.run_dir).absolute() / "checkpoints")


def newest_step(config: ExperimentConfig) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    checkpoint = checkpoint_store(config).newest()
    return 0 if checkpoint is None else checkpoint.manifest.run.step


def finished_message(config: ExperimentConfig) -> str:
    """Return why a run has no steps left, and possible commands; empty if it has steps."""
    num_steps, folder = config.num_steps, Path(config.trainer.run_dir)
    lacks_export = config.exports_model and not (folder / "hf").is_dir()
    step = newest_step(config)
    if step < num_steps or lacks_export:
        return ""
    return (
        f"the run in {folder} is finished: step {step} of {num_steps}. Raise "
        "trainer.num_steps to continue, or set trainer.run_dir to a new folder"
    )


def should_resume(config: ExperimentConfig) -> bool:
    """Return whether the run in the run folder continues, from a checkpoint or from step 0.

    Raises:
        CheckpointError: it was begun with another recipe, and the change was not accepted.
        RunFolderError: it made no checkpoints, so its value is unknown.
    """
    folder = Path(config.trainer.run_dir)
    former = folder / "config.yaml"
    if config.trainer.overwrite or not former.is_file():
        return False
    checkpoint = checkpoint_store(config).newest()
    accept = config.checkpoint.accept_changes
    if checkpoint is not None:
        saved = checkpoint.manifest.origin.recipe
        check_recipe(saved, recipe_of(config), where=folder, accept=accept)
        return True
    begun, _ = read_stored(read_yaml(former.read_text(encoding="utf-8")))
    if begun is None or not begun.checkpoint.every_num_steps:
        raise RunFolderError(
            f"run folder {folder} holds a run without checkpoints, which cannot be resumed; set "
            "trainer.run_dir to a new folder, or trainer.overwrite=true to replace it"
        )
    check_recipe(recipe_of(begun), recipe_of(config), where=folder, accept=accept)
    return True


def run_fingerprint(config: ExperimentConfig, model_folder: Path) -> RunFingerprint:
    """Return the fingerprint: everything that the numbers of this run depend on."""
    reads_weights = config.lora.enabled or config.needs_reference
    return RunFingerprint(
        recipe=recipe_of(config),
        model_folder=str(model_folder.absolute()),
        fingerprints={
            **folder_fingerprints(model_folder, with_weights=reads_weights),
            **own_fingerprints(config),
        },
        environment=environment_of(config),
    )


def check_resumable(
    config: ExperimentConfig, origin: RunFingerprint, *, rows: SamplerState
) -> None:
    """Compare the newest checkpoint, if there is one, with the run that would resume from it.

    Differences are logged if they were accepted, or change no more than the last bit. ``rows`` is
    the state of the run's sampler, with the fingerprint of its rows.

    Raises:
        CheckpointError: recipe, tokenizer, model, the user's functions or the teacher have changed,
            and that was not accepted.
        DataError: the rows have changed.
        RunFolderError: lines of the run's files are lost, and that was not accepted.
    """
    checkpoint = checkpoint_store(config).newest()
    if checkpoint is None:
        return
    saved, where = checkpoint.manifest.origin, checkpoint.folder
    accept = config.checkpoint.accept_changes
    changes = check_recipe(saved.recipe, origin.recipe, where=where, accept=accept)
    changes += check_fingerprints(saved, origin, where=where, accept=accept)
    former = checkpoint.manifest.run.sampler.fingerprint
    if former != rows.fingerprint:
        changes.append(describe_change(former, rows.fingerprint))
        if not accept:
            raise DataError(
                f"{where}: the data has changed ({changes[-1]}); bring the old data.train_files "
                "back, set trainer.run_dir to a new folder, or set checkpoint.accept_changes=true "
                "to continue at the same position of the new rows"
            )
    run, folder = checkpoint.manifest.run, Path(config.trainer.run_dir)
    lost = lost_lines(folder, run.log_sizes)
    changes += lost
    if lost and not accept:
        raise RunFolderError(
            f"run folder {folder} has lost lines that were written before the checkpoint of step "
            f"{run.step}: {'; '.join(lost)}. Bring the files back from a copy, set "
            "checkpoint.accept_changes=true to continue with the complete lines that are left, or "
            "set trainer.run_dir to a new folder"
        )
    for change in changes:
        log.warning("resuming with a change that was accepted: %s", change)
    for change in environment_changes(saved.environment, origin.environment):
        log.warning("resuming, but not bitwise identical: %s", change)
