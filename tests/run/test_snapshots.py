from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from hybridrl.checkpoint.store import CheckpointStore, FileEntry, RunFingerprint, RunState
from hybridrl.config.trainer import CheckpointConfig
from hybridrl.data.rows import SamplerState
from hybridrl.errors import CheckpointError, RemoteCallError
from hybridrl.run.checkpoints import Checkpointer
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter, is_unchanged
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.shard_spec import RankShards
from hybridrl.workers.train.shards import rank_shards

CONFIG = CheckpointConfig(
    every_num_steps=2,
    keep_last=2,
    keep_best=0,
    best_metric=None,
    best_is="highest",
    resume="auto",
    accept_changes=False,
    max_restarts=0,
)


class Engine:
    """A model of one weight; what is saved and loaded is real."""

    def __init__(self) -> None:
        self.weight = torch.zeros(50_000)
        self.num_updates = 0

    def checkpoint_tensors(self) -> dict[str, RankShards]:
        return {"model.weight": rank_shards(self.weight)}

    def begin_restore(self, *, num_updates: int) -> None:
        self.num_updates = num_updates

    def end_restore(self) -> None:
        """Do nothing: the weight was filled."""


class Rank:
    """A rank without Ray, which says of a failed save what a worker group would."""

    def __init__(self) -> None:
        self.engine = Engine()
        self._writer = CheckpointWriter()
        self.may_write = threading.Event()
        self.may_write.set()

    def save(self, folder: Path) -> list[None]:
        name = checkpoint.file_name(rank=0, world_size=1)
        self._writer._thread.submit(self.may_write.wait)
        self._writer.begin(cast(ModelEngine, self.engine), folder / name, notes={})
        return [None]

    def collect_saved(self, waits: bool) -> list[FileEntry | None]:
        try:
            return [self._writer.collect(waits=waits)]
        except CheckpointError as error:
            raise RemoteCallError(
                rank=0,
                host="here",
                method="collect_saved",
                cause=f"CheckpointError: {error}",
                traceback="",
            ) from error

    def find_torn(self, folder: Path, files: Sequence[FileEntry]) -> list[list[str]]:
        return [[entry.name for entry in files if not is_unchanged(folder / entry.name, entry)]]

    def load(self, folder: Path) -> list[None]:
        checkpoint.load(cast(ModelEngine, self.engine), folder, rank=0, world_size=1)
        return [None]


def test_a_step_does_not_wait_for_the_disk_and_the_next_ones_find_the_checkpoint_whole(
    tmp_path: Path,
) -> None:
    rank, checkpointer, shelf = _build(tmp_path)
    rank.may_write.clear()
    _train(rank, checkpointer, [1, 2, 3])
    assert shelf.newest() is None
    rank.may_write.set()
    while shelf.newest() is None:
        checkpointer.after_step(3, {}, is_last=False)
    assert shelf.steps() == [2]
    assert checkpointer.restore() is not None
    assert rank.engine.weight[0] == 2.0  # as it was after step 2, not as it became in step 3


def test_what_is_saved_is_what_was_after_the_step_whatever_training_does_meanwhile(
    tmp_path: Path,
) -> None:
    rank, checkpointer, _ = _build(tmp_path)
    _train(rank, checkpointer, [1, 2, 3, 4, 5], last=5)
    restored = checkpointer.restore()
    assert restored is not None
    weight = rank.engine.weight[7].item()
    assert (restored.step, rank.engine.num_updates, weight) == (5, 5, 5.0)


def _build(tmp_path: Path) -> tuple[Rank, Checkpointer, CheckpointStore]:
    rank, shelf = Rank(), CheckpointStore(tmp_path / "checkpoints")
    origin = RunFingerprint(recipe={}, model_folder="", fingerprints={}, environment={})
    checkpointer = Checkpointer(
        shelf, {"actor": rank}, config=CONFIG, origin=origin, capture=_state
    )
    return rank, checkpointer, shelf


def _state(step: int) -> RunState:
    return RunState(
        step=step, sampler=SamplerState(step, "f"), num_skipped=0, elapsed_s=0.0, log_sizes={}
    )


def _train(
    rank: Rank, checkpointer: Checkpointer, steps: Sequence[int] | range, *, last: int = 0
) -> None:
    for step in steps:
        rank.engine.weight.fill_(step)
        rank.engine.num_updates = step
        checkpointer.after_step(step, {}, is_last=step == last)
