from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.checkpoint.store import CheckpointStore, FileEntry, RunState
from hybridrl.data.rows import SamplerState
from hybridrl.errors import CheckpointError, RemoteCallError, WorkerDiedError
from hybridrl.metrics import Mean, Metrics
from hybridrl.run.after_checkpoint import open_function
from hybridrl.run.checkpoints import Checkpointer, run_fingerprint
from hybridrl.workers.train.checkpoint import ShardReader, is_unchanged
from hybridrl.workers.train.shard_spec import ShardSpec, TensorShard
from hybridrl.workers.train.shards import rank_shards
from tests.config.values import config_of
from tests.workers.train.shard_writer import write_shards


@dataclass
class Ranks:
    """Two ranks whose state is one number; the second may be slow, out of room, or dead."""

    value: float = 0.0
    is_slow: bool = False
    fault: RemoteCallError | None = None
    began: list[tuple[Path, float]] = field(default_factory=list)

    def save(self, folder: Path) -> list[None]:
        self.began.append((folder, self.value))
        return [None, None]

    def collect_saved(self, waits: bool) -> list[FileEntry | None]:
        if self.fault is not None:
            raise self.fault
        if self.is_slow and not waits:
            return [self._write(0), None]
        return [self._write(0), self._write(1)]

    def find_torn(self, folder: Path, files: Sequence[FileEntry]) -> list[list[str]]:
        return [[entry.name for entry in files if not is_unchanged(folder / entry.name, entry)]]

    def load(self, folder: Path) -> list[None]:
        value = torch.zeros(1)
        with ShardReader(folder) as reader:
            reader.fill({"value": rank_shards(value)})
        self.value = float(value)
        return [None, None]

    def _write(self, rank: int) -> FileEntry:
        folder, value = self.began[-1]
        folder.mkdir(exist_ok=True)
        shard = TensorShard(torch.full((1,), value), ShardSpec((1,), ((0, 1),)))
        return write_shards(folder / f"rank-{rank}.safetensors", {"value": shard}, notes={})


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def checkpointer(
    folder: Path, ranks: Ranks, *, timeout_s: float = 600.0, **changes: Any
) -> Checkpointer:
    few: dict[str, Any] = {"every_num_steps": 2, "keep_last": 2, "keep_best": 0}
    config = replace(config_of().checkpoint, **(few | changes))

    def capture(step: int) -> RunState:
        return RunState(
            step=step,
            sampler=SamplerState(10 * step, "rows"),
            num_skipped=0,
            elapsed_s=1.0,
            log_sizes={},
        )

    origin = run_fingerprint(config_of(), folder)
    return Checkpointer(
        shelf=CheckpointStore(folder),
        savers={"actor": ranks},
        config=config,
        origin=origin,
        capture=capture,
        function=open_function(config, timeout_s=timeout_s),
    )


def steps_on(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*[0-9]"))


def take(
    saving: Checkpointer, ranks: Ranks, steps: Sequence[int], *, last: int | None = None
) -> Iterator[Metrics]:
    for step in steps:
        ranks.value = float(step)
        yield saving.after_step(step, {}, is_last=step == last)


@pytest.mark.shows("R1.3")
@pytest.mark.parametrize(
    ("every", "last", "saved"), [(2, 5, [2, 4, 5]), (2, 4, [2, 4]), (0, 4, [])]
)
def test_a_run_is_saved_once_at_each_interval_and_after_its_last_step(
    tmp_path: Path, ranks: Ranks, every: int, last: int, saved: list[int]
) -> None:
    saving = checkpointer(tmp_path, ranks, every_num_steps=every, keep_last=9)
    list(take(saving, ranks, range(1, last + 1), last=last))
    assert steps_on(tmp_path) == [value for _, value in ranks.began] == saved


@pytest.mark.shows("R1.1")
def test_steps_go_on_while_a_slow_rank_writes_and_there_is_no_checkpoint_until_all_have(
    tmp_path: Path, ranks: Ranks
) -> None:
    ranks.is_slow = True
    saving = checkpointer(tmp_path, ranks)
    costs = list(take(saving, ranks, (1, 2, 3)))
    assert steps_on(tmp_path) == []
    assert CheckpointStore(tmp_path).newest() is None
    ranks.is_slow = False
    costs += take(saving, ranks, (4,))
    assert steps_on(tmp_path) == [2]
    assert [sum("bytes" in name for name in cost) for cost in costs] == [0, 0, 0, 1]


@pytest.mark.shows("R1.2")
def test_the_next_save_waits_for_the_one_before(tmp_path: Path, ranks: Ranks) -> None:
    ranks.is_slow = True
    list(take(checkpointer(tmp_path, ranks), ranks, range(1, 7)))
    assert steps_on(tmp_path) == [2, 4]


@pytest.mark.shows("R1.6")
def test_a_run_goes_on_from_the_newest_whole_one_and_torn_bytes_are_set_aside(
    tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    list(take(checkpointer(tmp_path, ranks, keep_last=9), ranks, range(1, 7), last=6))
    CheckpointStore(tmp_path).begin(8)  # killed while it wrote
    file = tmp_path / "step-000000006" / "actor" / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        run = checkpointer(tmp_path, ranks).restore()
    assert run is not None
    assert (run.step, run.sampler.num_drawn, ranks.value) == (4, 40, 4.0)
    assert "the bytes of actor/rank-1.safetensors have changed" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("step-000000002", "step-000000004", "step-000000006.torn")
    ]


@pytest.mark.shows("R1.6")
def test_where_all_are_torn_the_run_does_not_begin_anew_unasked(
    tmp_path: Path, ranks: Ranks
) -> None:
    list(take(checkpointer(tmp_path, ranks), ranks, range(1, 5), last=4))
    for file in tmp_path.glob("*/actor/rank-0.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    for _ in range(2):  # nor the next time
        with pytest.raises(
            CheckpointError, match=r"all .* are incomplete or corrupt: .*overwrite=true"
        ):
            checkpointer(tmp_path, ranks).restore()
    assert len(list(tmp_path.glob("*.torn"))) == 2


def no_room() -> RemoteCallError:
    why = CheckpointError("rank-1 cannot be written: no space left; free space on its disk")
    cause = f"CheckpointError: {why}"
    error = RemoteCallError(
        rank=1, host="h", method="collect_saved", cause=cause, traceback="File shards.py, line 9"
    )
    error.__cause__ = why
    return error


@pytest.mark.shows("R1.7")
def test_two_saves_without_room_are_warnings_and_a_third_in_a_row_ends_the_run(
    tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    saving = checkpointer(tmp_path, ranks)
    list(take(saving, ranks, range(1, 4)))
    assert steps_on(tmp_path) == [2]
    ranks.fault = no_room()
    list(take(saving, ranks, range(4, 9)))
    assert caplog.text.count("its disk; training continues, the next checkpoint tries again") == 2
    assert "shards.py" not in caplog.text
    with pytest.raises(CheckpointError, match=r"3 checkpoints in a row.*same command again"):
        list(take(saving, ranks, (9,)))
    assert steps_on(tmp_path) == [2]
    assert not list(tmp_path.glob("*.unfinished"))  # its bytes are given back


@pytest.mark.shows("R1.7")
def test_a_save_that_works_starts_the_count_of_failed_ones_anew(
    tmp_path: Path, ranks: Ranks
) -> None:
    saving = checkpointer(tmp_path, ranks)
    for begin in (2, 8, 14):
        ranks.fault = no_room()
        list(take(saving, ranks, range(begin, begin + 4)))  # two fail
        ranks.fault = None
        list(take(saving, ranks, (begin + 4, begin + 5)))
        assert steps_on(tmp_path)[-1] == begin + 4


def test_a_folder_that_cannot_be_made_counts_as_a_failed_save_and_a_death_does_not(
    tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    list(take(checkpointer(tmp_path / "checkpoints", ranks), ranks, (1, 2, 3)))
    assert "checkpoint of step 2" in caplog.text
    assert not ranks.began
    saving = checkpointer(tmp_path / "other", ranks)
    list(take(saving, ranks, (1, 2)))
    ranks.fault = WorkerDiedError(rank=1, host="h", method="save", cause="killed", traceback="")
    with pytest.raises(WorkerDiedError):
        list(take(saving, ranks, (3,)))


@pytest.mark.shows("R1.4")
@pytest.mark.parametrize(
    ("name", "key", "kept"),
    [
        ("eval/reward/mean", None, [4, 8]),
        ("eval/loss_nats", None, [2, 8]),  # a loss is better where it is lower
        ("eval/math/pass_at_8", "eval/math/pass_at_8", [4, 8]),
        ("eval/math/truncated_fraction", "eval/math/truncated_fraction", [2, 8]),
    ],
)
def test_the_best_of_the_evaluations_is_kept(
    tmp_path: Path, ranks: Ranks, name: str, key: str | None, kept: list[int]
) -> None:
    saving = checkpointer(tmp_path, ranks, keep_last=1, keep_best=1, best_metric=key)
    for step, quality in ((2, 0.1), (4, 0.9), (6, math.nan), (8, 0.3)):
        metrics: Metrics = {"eval/reward/mean": Mean(float(step == 6))} if key else {}
        metrics[name] = Mean(quality)
        saving.after_step(step, metrics, is_last=step == 8)
    assert steps_on(tmp_path) == kept


_NOTE = """
import pathlib, time

def note(step, folder):
    names = sorted(path.name for path in folder.iterdir())
    with open("{notes}", "a") as file:
        print(step, folder.name, "manifest.json" in names, file=file)
    {what}
    assert folder.is_dir()  # it is not deleted meanwhile
    with open("{notes}", "a") as file:
        print("end", step, file=file)
"""


@pytest.mark.shows("R1.4")
def test_an_evaluation_that_ends_later_judges_the_checkpoint_of_its_step(
    tmp_path: Path, ranks: Ranks
) -> None:
    late: Metrics = {"eval/reward/mean": Mean(0.75)}
    saving = checkpointer(tmp_path, ranks)
    list(take(saving, ranks, (1, 2)))
    saving.note_evaluation(2, late)  # while it is being written
    list(take(saving, ranks, (3, 4, 5)))
    resumed = checkpointer(tmp_path, ranks)
    assert resumed.restore() is not None
    resumed.note_evaluation(4, late | {"eval/reward/mean": Mean(0.25)})
    resumed.note_evaluation(3, late)  # it has no checkpoint
    shelf = CheckpointStore(tmp_path)
    scores = [each.manifest.score for step in (2, 4) if (each := shelf.at(step)) is not None]
    assert scores == [0.75, 0.25]


def noting(folder: Path, what: str = "pass") -> tuple[str, Path]:
    """Return a function of the user's that does ``what``, and the file of its notes."""
    file, notes = folder / "note.py", folder / "notes.txt"
    file.write_text(_NOTE.format(notes=notes, what=what))
    notes.touch()
    return f"{file}:note", notes


def test_the_users_function_gets_each_complete_checkpoint_and_the_last_one(
    tmp_path: Path, ranks: Ranks
) -> None:
    function, notes = noting(tmp_path, "time.sleep(0.2)")
    saving = checkpointer(tmp_path / "c", ranks, keep_last=1, function=function)
    with saving.completed_after_errors():
        list(take(saving, ranks, range(1, 6), last=5))
    lines = notes.read_text().splitlines()
    steps = ((step, f"step-{step:09} True") for step in (2, 4, 5))
    assert lines == [text for step, name in steps for text in (f"{step} {name}", f"end {step}")]
    assert steps_on(tmp_path / "c") == [5]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raise ValueError('no bucket')", r"raised ValueError: no bucket \(note.py:8\)"),
        ("import os; os._exit(3)", "ended its process, exit code 3"),
        ("time.sleep(600)", "took longer than 1.5 s"),
    ],
)
def test_a_function_that_fails_or_hangs_is_named_and_no_checkpoint_is_lost(
    tmp_path: Path, ranks: Ranks, what: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    function, notes = noting(tmp_path, f"if step == 2: {what}")
    saving = checkpointer(tmp_path / "c", ranks, function=function, timeout_s=1.5)
    with saving.completed_after_errors():
        list(take(saving, ranks, range(1, 6), last=5))
    assert steps_on(tmp_path / "c") == [4, 5]
    assert [line for line in notes.read_text().splitlines() if "end" in line] == ["end 4", "end 5"]
    [warning] = [text for text in caplog.messages if text.startswith("checkpoint.function=")]
    assert re.search(rf"checkpoint.function={function} failed after step 2: .*{says}", warning)
