"""The shared base of all workers with a training engine: saving and loading it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hybridrl.checkpoint.manifest import FileEntry
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.single_controller import Dispatch, Worker, register
from hybridrl.workers.process_group import start_process_group
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter, Notes
from hybridrl.workers.train.checkpoint_files import is_unchanged
from hybridrl.workers.train.model_engine import ModelEngine


class CheckpointedWorker(Worker):
    """A worker whose training engine is saved and loaded.

    Call ``join_group`` before the engine is built and ``start_work`` when all engines are.
    """

    _writer: CheckpointWriter

    @abstractmethod
    def checkpointed_engine(self) -> ModelEngine:
        """Return the engine, resident on its device."""

    def notes(self) -> Notes:
        """Return small state that a resumed worker needs besides the engine's."""
        return {}

    def take_up(self, notes: Mapping[str, object]) -> None:
        """Restore the state that `notes` returned."""

    def join_group(self, config: ExperimentConfig) -> torch.device:
        """Join the process group of all ranks, and return this rank's device."""
        return start_process_group(
            device=config.cluster.device,
            local_rank=self.local_rank,
            timeout_s=config.cluster.collective_timeout_s,
        )

    def start_work(self, engine: ModelEngine, *, seed: int) -> None:
        """Start generators and the thread that writes; say which rows this rank trains on."""
        checkpoint.seed_generators(seed, rank=self.rank)
        self._writer = CheckpointWriter()
        self.register_mesh(
            "train",
            dp_rank=engine.dp_rank,
            dp_size=engine.dp_size,
            is_output_rank=engine.is_output_rank,
        )

    @register(Dispatch.ONE_TO_ALL)
    def export_hf(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, atomically."""
        self.checkpointed_engine().export_hf(folder)

    @register(Dispatch.ONE_TO_ALL)
    def save(self, folder: Path) -> None:
        """Copy this rank's shard to the host and begin to write it; training may go ahead."""
        name = checkpoint.file_name(rank=self.rank, world_size=self.world_size)
        self._writer.begin(self.checkpointed_engine(), folder / name, notes=self.notes())

    @register(Dispatch.ONE_TO_ALL)
    def collect_saved(self, waits: bool) -> FileEntry | None:  # noqa: FBT001 - a remote call
        """Return the written files, or None while they are still being written."""
        return self._writer.collect(waits=waits)

    @register(Dispatch.ONE_TO_ALL)
    def find_torn(self, folder: Path, files: Sequence[FileEntry]) -> list[str]:
        """Read this rank's share of ``files`` and name those whose bytes have changed."""
        own_files = files[self.rank :: self.world_size]
        return [entry.name for entry in own_files if not is_unchanged(folder / entry.name, entry)]

    @register(Dispatch.ONE_TO_ALL)
    def load(self, folder: Path) -> None:
        """Restore the state of the ranks that wrote ``folder``."""
        engine = self.checkpointed_engine()
        notes = checkpoint.load(engine, folder, rank=self.rank, world_size=self.world_size)
        self.take_up(notes)

    def close(self) -> None:
        """Finish the write in progress."""
        self._writer.close()
