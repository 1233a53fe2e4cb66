"""A checkpoint as a Hugging Face folder: one process reads the files of all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hybridrl.checkpoint.store import Checkpoint, CheckpointStore
from hybridrl.config.actor import FSDP2Config
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.load import read_stored
from hybridrl.errors import CheckpointError, RunFolderError
from hybridrl.workers.build import build_reward_trainer, build_train_engine
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.value_engines import RewardEngine


def export_checkpoint(
    run_folder: Path, *, step: int | None = None, output: Path | None = None
) -> list[Path]:
    """Write a checkpoint of ``run_folder`` as a Hugging Face folder, and an adapter if it has one.

    Args:
        run_folder: of a run that continues, was interrupted, or has ended.
        step: of the checkpoint; None is the newest complete one.
        output: folder to write, must not exist; None names it in the run folder.

    Raises:
        RunFolderError: it is not a run folder, or a folder to write exists.
        CheckpointError: the checkpoint does not exist, or is incomplete.
        ModelError: the run's first model does not exist any more.
    """
    path = run_folder / "config.yaml"
    if not path.is_file():
        raise RunFolderError(f"{run_folder} is not a run folder: it has no config.yaml")
    config, violations = read_stored(read_yaml(path.read_text(encoding="utf-8")))
    if config is None:
        raise RunFolderError(
            f"{path} cannot be read: {violations[0]} Export with the version that wrote it"
        )
    chosen = _find(run_folder, step)
    number = chosen.manifest.run.step
    written = [output or run_folder / f"hf-step-{number}"]
    if config.lora.enabled:
        written.append(
            run_folder / f"adapter-step-{number}"
            if output is None
            else output.with_name(f"{output.name}-adapter")
        )
    for folder in written:  # before all the work
        if folder.exists():
            raise RunFolderError(f"{folder} exists; export to a new folder with --output FOLDER")
    model_folder = Path(chosen.manifest.origin.model_folder)
    actor = replace(config.actor, engine="fsdp2", fsdp2=FSDP2Config())  # reads all checkpoints
    on_fsdp2 = replace(config, actor=actor)
    is_reward_model = config.mode == "reward_model"
    build = build_reward_trainer if is_reward_model else build_train_engine
    engine: PolicyEngine | RewardEngine = build(on_fsdp2, model_folder, torch.device("cpu"))
    checkpoint.load_weights(engine, chosen.folder / "actor")
    engine.export_hf(written[0].absolute())
    if config.lora.enabled and isinstance(engine, PolicyEngine):
        engine.export_adapter(written[1].absolute())
    return written


def _find(run_folder: Path, step: int | None) -> Checkpoint:
    store = CheckpointStore(run_folder.absolute() / "checkpoints")
    checkpoint = store.newest() if step is None else store.at(step)
    if checkpoint is None:
        steps = ", ".join(map(str, store.steps())) or "none"
        missing = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(
            f"{run_folder} has no {missing}; it has: {steps} (checkpoint.keep_last and "
            "checkpoint.keep_best say how many are kept)"
        )
    return checkpoint
