"""Finished groups of a run that samples ahead, in its checkpoints.

A file holds the tensors of all samples, and in its header the other facts about them: nothing in it
is executed when it is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from hybridrl.checkpoint.store import FileEntry
from hybridrl.json_text import to_json_text
from hybridrl.sampler import FinishedGroup
from hybridrl.workers.rollout.sample_parts import parts_of, sample_of
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.train.checkpoint import is_unchanged, write_file

log = logging.getLogger(__name__)

_NAME = "groups.safetensors"


FinishedGroups = Mapping[int, FinishedGroup]
"""By the index of the prompt in the run's stream."""


class GroupSaver:
    """Saves the finished groups of the rollout manager, and gives them back to another one."""

    def __init__(self, servers: ManagerClient, *, origin: str) -> None:
        """``origin`` is of all that the groups depend on: those of another one are not used."""
        self._servers = servers
        self._origin = origin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="groups")
        self._writing: Future[FileEntry] = Future()

    def save(self, folder: Path) -> list[None]:
        """Ask for the groups, and begin to write them."""
        groups = self._servers.finished_groups()
        self._writing = self._thread.submit(_write, folder, groups, self._origin)
        return [None]

    def collect_saved(self, waits: bool) -> list[FileEntry | None]:  # noqa: FBT001 - as ranks do
        """Return the file; None while it is written; an OSError if it cannot be."""
        return [self._writing.result() if waits or self._writing.done() else None]

    def find_torn(self, folder: Path, files: Sequence[FileEntry]) -> list[list[str]]:
        """Name the file if its bytes have changed."""
        return [[entry.name for entry in files if not is_unchanged(folder / entry.name, entry)]]

    def load(self, folder: Path) -> list[None]:
        """Give the groups to the manager, unless the run depends on something else by now."""
        if (folder / _NAME).is_file():  # older versions wrote none
            origin, groups = read_groups(folder)
            if origin == self._origin:
                self._servers.keep_groups(groups)
                log.info("%d finished groups of the checkpoint are learned from", len(groups))
            else:
                log.warning(
                    "settings or data have changed, so %d finished groups of the checkpoint are "
                    "sampled again",
                    len(groups),
                )
        return [None]


def _write(folder: Path, groups: FinishedGroups, origin: str) -> FileEntry:
    folder.mkdir(exist_ok=True)
    return write_file(folder / _NAME, pack_groups(groups, origin=origin), [])


def pack_groups(groups: FinishedGroups, *, origin: str) -> bytes:
    """Return a safetensors file; groups with images in their responses are left out."""
    tensors: dict[str, Tensor] = {}
    facts: list[dict[str, object]] = []
    for index, group in groups.items():
        if any(sample.images is not None for sample in group.samples):
            continue
        parts = [parts_of(sample) for sample in group.samples]
        for number, (columns, _) in enumerate(parts):
            tensors |= {f"groups.{index}.{number}.{name}": v for name, v in columns.items()}
        facts.append({"index": index, "step": group.step, "samples": [own for _, own in parts]})
    data: bytes = save(tensors, {"origin": origin, "groups": to_json_text(facts)})
    return data


def read_groups(folder: Path) -> tuple[str, FinishedGroups]:
    """Return the origin of the groups of a checkpoint, and the groups."""
    with safe_open(folder / _NAME, framework="pt") as file:
        metadata = file.metadata()
        columns: dict[str, dict[str, Tensor]] = {}
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            sample, _, name = key.rpartition(".")
            columns.setdefault(sample, {})[name] = file.get_tensor(key)
    groups = {
        each["index"]: FinishedGroup(
            each["step"],
            tuple(
                sample_of(columns[f"groups.{each['index']}.{number}"], facts)
                for number, facts in enumerate(each["samples"])
            ),
        )
        for each in json.loads(metadata["groups"])
    }
    return metadata["origin"], groups
