from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    FileEntry,
    Manifest,
    RunFingerprint,
    RunState,
)
from hybridrl.data.rows import SamplerState
from hybridrl.errors import CheckpointError


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = _manifest(3, score=0.5)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "rank").write_bytes(b"abc")
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest


def test_the_newest_whole_checkpoint_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = CheckpointStore(tmp_path / "checkpoints")
    assert shelf.newest() is None
    for step in (9, 10, 100):
        _commit(shelf, step)
    assert _step(shelf.newest()) == 100
    (tmp_path / "checkpoints" / "step-000000100" / "actor" / "rank").write_bytes(b"ab")
    assert _step(shelf.newest()) == 10


def test_the_same_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path)
    _commit(shelf, 1, score=0.1)
    _commit(shelf, 1, score=0.2)
    newest = shelf.newest()
    assert newest is not None and newest.manifest.score == 0.2


@pytest.mark.shows("R1.4")
@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(1, 0, {5}), (2, 1, {4, 5, 2}), (1, 2, {5, 2, 3}), (9, 9, {1, 2, 3, 4, 5})],
)
def test_the_last_and_the_best_are_kept(
    tmp_path: Path, keep_last: int, keep_best: int, kept: set[int]
) -> None:
    shelf = CheckpointStore(tmp_path)
    for step, score in enumerate((0.1, 0.9, 0.5, 0.3, None), 1):
        _commit(shelf, step, score=score)
    shelf.prune(keep_last=keep_last, keep_best=keep_best)
    assert {int(path.name[5:]) for path in tmp_path.iterdir()} == kept


@pytest.mark.shows("R1.4")
@pytest.mark.parametrize("keep_last", [1, 2])
def test_incomplete_checkpoints_do_not_count_as_kept(tmp_path: Path, keep_last: int) -> None:
    shelf = CheckpointStore(tmp_path)
    for step in (40, 50, 60):
        _commit(shelf, step)
    (tmp_path / "step-000000060" / "actor" / "rank").unlink()
    assert _step(shelf.newest()) == 50
    _commit(shelf, 55)  # other steps are saved now, so that 60 is not replaced
    shelf.prune(keep_last=keep_last, keep_best=0)
    assert _step(shelf.newest()) == 55
    whole = {step for step in (40, 50, 55) if (tmp_path / f"step-{step:09}").exists()}
    assert len(whole) == keep_last


def test_quarantined_checkpoint_is_kept_but_never_resumed(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path)
    for _ in range(2):  # twice, of the same step
        _commit(shelf, 1)
        torn = _commit(shelf, 2).folder
        shelf.quarantine(torn)
        assert _step(shelf.newest()) == 1
        assert (tmp_path / "step-000000002.torn" / "actor" / "rank").read_bytes() == b"abc"


@pytest.mark.shows("R2.9")
def test_another_format_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match=r"format 99.*version of hybridrl that wrote it"):
        Manifest.read(tmp_path)
    (tmp_path / "step-000000003").mkdir()
    (tmp_path / "manifest.json").rename(tmp_path / "step-000000003" / "manifest.json")
    with pytest.raises(CheckpointError, match="format 99"):  # and not begun anew
        CheckpointStore(tmp_path).newest()


@pytest.mark.shows("R1.5")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "run": 3}'])
def test_a_manifest_that_is_not_whole_is_torn(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="incomplete"):
        Manifest.read(tmp_path)


def _manifest(step: int, *, score: float | None = None) -> Manifest:
    return Manifest(
        run=RunState(
            step=step,
            sampler=SamplerState(7, "f"),
            num_skipped=1,
            elapsed_s=0.1,
            log_sizes={"metrics.jsonl": 9},
        ),
        origin=RunFingerprint(
            recipe={"a.b": [1, None]},
            model_folder="model",
            fingerprints={"t": "x"},
            environment={"e": "1"},
        ),
        files=(FileEntry(name="actor/rank", num_bytes=3, crc32=1),),
        score=score,
    )


def _commit(shelf: CheckpointStore, step: int, *, score: float | None = None) -> Checkpoint:
    unfinished = shelf.begin(step)
    (unfinished / "actor").mkdir()
    (unfinished / "actor" / "rank").write_bytes(b"abc")
    return shelf.commit(unfinished, _manifest(step, score=score))


def _step(found: Checkpoint | None) -> int | None:
    return None if found is None else found.manifest.run.step
