"""Whether a run folder's run continues: decided before Ray and before workers start."""

from __future__ import annotations

import logging
from pathlib import Path

from hybridrl.checkpoint.fingerprint import (
    check_fingerprints,
    check_recipe,
    environment_changes,
    environment_of,
    folder_fingerprints,
    own_fingerprints,
    recipe_of,
)
from hybridrl.checkpoint.store import CheckpointStore, RunFingerprint
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.load import read_config
from hybridrl.data.rows import SamplerState
from hybridrl.data.sampler import describe_change
from hybridrl.errors import DataError, RunFolderError
from hybridrl.run.run_folder import lost_lines

log = logging.getLogger(__name__)


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
    if newest_step(config) < num_steps or lacks_export:
        return ""
    return (
        f"the run in {folder} is finished: step {num_steps} of {num_steps}. Raise "
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
    begun, _ = read_config(read_yaml(former.read_text(encoding="utf-8")))
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
