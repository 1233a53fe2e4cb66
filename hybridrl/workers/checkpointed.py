"""The shared base of all workers with a training engine: group, saving, loading, profiles."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl import env
from hybridrl.checkpoint.store import FileEntry
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ResourceError
from hybridrl.network import bind
from hybridrl.single_controller import Dispatch, Worker, register
from hybridrl.workers import profiler
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter, Notes, is_unchanged
from hybridrl.workers.train.model_engine import ModelEngine

_STORE_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"


def start_process_group(*, device: str, local_rank: int, timeout_s: float) -> torch.device:
    """Join the group that RANK, WORLD_SIZE and MASTER_ADDR describe, and take this rank's device.

    A group that exists already, of a program that embeds a worker, is used unchanged. ``device`` is
    ``cpu`` (gloo) or ``cuda`` (nccl, with gloo for CPU tensors).
    """
    timeout = timedelta(seconds=timeout_s)
    chosen, gpu, backend = torch.device("cpu"), None, "gloo"
    if device != "cpu":
        if not torch.cuda.is_available():
            raise ResourceError(
                "cluster.device=cuda, but torch finds no CUDA device on this worker; "
                "set cluster.device=cpu, or install a CUDA build of torch"
            )
        torch.cuda.set_device(local_rank)
        # A group that is bound to a GPU connects NCCL now, before the rollout engine sizes itself.
        # But it has torch split NCCL's communicator for each further group, and a split waits for
        # all ranks: see ``ControlGroup.subgroup`` and ``WeightGroup``.
        chosen = gpu = torch.device("cuda", local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if dist.is_initialized():
        return chosen
    address, port = env.get("MASTER_ADDR"), int(env.get("MASTER_PORT", "0"))
    if not address or env.get(_STORE_OF_TORCHRUN):
        dist.init_process_group(backend, timeout=timeout, device_id=gpu)
        return chosen
    # torch's own store listens at all addresses of the machine, and any process that reaches it may
    # write to it. This one listens at MASTER_ADDR alone.
    rank, world_size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    listening = None
    if rank == 0:
        bound = bind(address, port)
        bound.listen(world_size)
        listening = bound.detach()  # the store closes it
    store = dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listening)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=gpu
    )
    return chosen


def end_process_group() -> None:
    """Leave the group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


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

    @register(Dispatch.ONE_TO_ALL)
    def profile(self, stem: Path | None) -> None:
        """Profile the calls from here on, into files that begin with ``stem``; None: write them.

        Of fused workers the first one gives the file its name.
        """
        if stem is None:
            profiler.of_process.end()
        else:
            profiler.of_process.begin(Path(f"{stem}.{type(self).__name__}.rank-{self.rank}"))

    def close(self) -> None:
        """Finish the write in progress."""
        self._writer.close()
