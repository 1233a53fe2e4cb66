"""Trackers with the real packages, kept local: a run that is resumed stays one run."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = 32768  # of W&B's file: the log format of LevelDB
_HEADER = 7


def run_part(
    folder: Path, tracker: str, first: int, last: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Track some steps in a process of its own, as the driver does."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "DO_NOT_TRACK": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.run.tracked_run", folder, tracker, str(first), str(last)],
        env=os.environ | environment | variables,
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield what W&B wrote into its file, as ``wandb sync`` reads it."""
    from wandb.proto import wandb_internal_pb2  # imports all of wandb

    data, at, parts = file.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        if (room := _BLOCK - at % _BLOCK) < _HEADER:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the package
def test_wandb_continues_the_same_run_after_a_resume(tmp_path: Path) -> None:
    for first, last in ((1, 2), (3, 4)):
        part = run_part(tmp_path / "run", "wandb", first, last, WANDB_MODE="offline")
        assert part.returncode == 0, part.stdout
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    runs = {(r.run.run_id, r.run.project, r.run.display_name) for r in records if r.HasField("run")}
    run_id = (tmp_path / "run" / "wandb_id.txt").read_text()
    assert runs == {(run_id, "digits", "run")}
    items = [
        {item.key or item.nested_key[0]: item.value_json for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    values = [(int(item["_step"]), float(item["reward/mean"])) for item in items]
    assert sorted(values) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert all("policy/grad_norm" not in item for item in items)


@pytest.mark.nightly
def test_mlflow_continues_the_same_run_after_a_resume(tmp_path: Path) -> None:
    for first, last in ((1, 2), (3, 4)):
        part = run_part(
            *(tmp_path / "run", "mlflow", first, last),
            MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/store.db",
        )
        assert part.returncode == 0, part.stdout
    with sqlite3.connect(tmp_path / "store.db") as store:
        runs = store.execute("SELECT run_uuid, name, status FROM runs").fetchall()
        metrics = store.execute("SELECT key, step, value FROM metrics ORDER BY step").fetchall()
    store.close()
    assert runs == [((tmp_path / "run" / "mlflow_id.txt").read_text(), "run", "FINISHED")]
    assert metrics == [("reward/mean", step, step / 10) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("tracker", "variables", "remedy"),
    [
        pytest.param(
            *("mlflow", {"MLFLOW_TRACKING_URI": "file:///nowhere"}),
            "set MLFLOW_TRACKING_URI=sqlite:",
            marks=pytest.mark.nightly,
        ),
        ("wandb", {"WANDB_API_KEY": "short", "WANDB_MODE": "online"}, "`wandb login`, set WANDB_"),
    ],
)
def test_a_service_that_refuses_is_told_with_its_remedy(
    tracker: str, variables: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    part = run_part(tmp_path / "run", tracker, 1, 1, **variables)
    assert part.returncode == 1
    assert f"TrackerError: tracking.trackers=[{tracker}]: " in part.stdout
    assert remedy in part.stdout
