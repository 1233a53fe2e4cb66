"""What a crash leaves, and what it does not: a second error."""

from __future__ import annotations

import csv
import os
import pickle
import signal
from pathlib import Path

import pytest

import hybridrl
from hybridrl.diagnostics.process_report import RankReport, attach_reports, reports_on
from hybridrl.errors import ConfigError, WorkerDiedError
from hybridrl.run.record import is_crash, open_record, write_postmortem
from hybridrl.trainer.interrupt import RunInterrupted
from tests.end_to_end.small import small_config

RANKS = (
    RankReport(
        rank=0,
        host="10.0.0.1",
        pid=71,
        state="sleeping",
        doing=(("update()", 2.5),),
        waits=True,
        top="all_reduce (c10d.py:9)",
        stacks="Thread 1: all_reduce",
        log_tail="a last word\n",
        memory=((1.5, 1000, 10), (0.5, 2000, 20)),
    ),
    RankReport(rank=1, host="10.0.0.2", pid=72, state="gone", exit="killed by signal 9 (SIGKILL)"),
)


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error):
        return error


def _death() -> BaseException:
    return _raised(
        WorkerDiedError(rank=1, host="10.0.0.2", method="update", cause="gone", traceback="")
    )


def _write(folder: Path, *, limit_s: float = 5.0) -> str:
    error = _death()
    attach_reports(error, RANKS)
    return write_postmortem(folder, error, where="in step 12 of 30, update", limit_s=limit_s)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("mode: train\n")
    (tmp_path / "log.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(100)))
    return tmp_path


def test_a_post_mortem_holds_what_was_known(run_folder: Path) -> None:
    folder = Path(_write(run_folder))
    assert folder.parent == run_folder / "postmortem"
    text = {path.name: path.read_text() for path in folder.iterdir()}
    what = text["what.txt"]
    assert "WorkerDiedError: rank 1 on 10.0.0.2: update() failed: gone" in what
    assert "in step 12 of 30, update\n" in what
    assert "restartable: yes" in what
    assert "rank 1 (10.0.0.2, pid 72, gone: killed by signal 9 (SIGKILL)): idle" in what
    assert "in _raised" in what  # the traceback
    assert "Thread 1: all_reduce" in text["stacks.txt"]
    assert "in _own_stacks" in text["stacks.txt"]  # the driver's
    assert "line 999\n" in text["log_tail.txt"]
    assert "line 700\n" not in text["log_tail.txt"]
    assert "a last word\n" in text["log_tail.txt"]
    assert text["config.yaml"] == "mode: train\n"
    assert text["metrics_tail.jsonl"].splitlines()[-1] == '{"step": 99}'
    assert f"hybridrl {hybridrl.__version__}\n" in text["versions.txt"]
    assert "\ntorch 2." in text["versions.txt"]
    rows = list(csv.reader(text["memory.csv"].splitlines()))
    assert rows[2:] == [
        ["rank 0", "10.0.0.1", "-1.5", "1000", "10"],
        ["rank 0", "10.0.0.1", "-0.5", "2000", "20"],
    ]


def test_crashes_of_the_same_second_do_not_overwrite_each_other(run_folder: Path) -> None:
    folders = {_write(run_folder) for _ in range(3)}
    assert {str(path) for path in (run_folder / "postmortem").iterdir()} == folders
    assert len(folders) == 3


def test_a_folder_that_cannot_be_written_is_told_and_is_no_error(run_folder: Path) -> None:
    (run_folder / "postmortem").write_text("a file is in the way")
    outcome = _write(run_folder)
    assert outcome.startswith("not written, ")
    assert (run_folder / "postmortem").read_text() == "a file is in the way"


@pytest.mark.shows("R7.5")
def test_half_a_post_mortem_is_none(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _full_disk)  # the disk of a test cannot be filled
    outcome = _write(run_folder)
    assert outcome == "not written, [Errno 28] No space left on device"
    assert list((run_folder / "postmortem").iterdir()) == []


def _full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.shows("R7.5")
def test_a_disk_that_hangs_costs_the_time_given_and_no_more(run_folder: Path) -> None:
    (run_folder / "config.yaml").unlink()
    os.mkfifo(run_folder / "config.yaml")  # whoever reads it waits for a writer
    outcome = _write(run_folder, limit_s=0.2)
    assert "did not take it within 0.2 s" in outcome
    os.close(os.open(run_folder / "config.yaml", os.O_RDWR))  # let the thread go


def test_reports_of_all_groups_stay_on_an_error() -> None:
    error = _death()
    for rank in RANKS:  # of two groups
        attach_reports(error, [rank])
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert reports_on(one) == RANKS
    try:
        raise ValueError from error
    except ValueError as another:
        assert reports_on(another) == RANKS


def test_each_error_is_explained_with_its_own_ranks(
    tmp_path: Path,
) -> None:
    with open_record(small_config(tmp_path / "run"), resolved_yaml="") as record:
        record.live.begin_step(1)
        record.live.phase("generate")
        tails = []
        for ranks in (RANKS, ()):
            error = _death()
            attach_reports(error, ranks)
            record.explain(error)
            where, post_mortem = error.__notes__
            assert where.startswith("in step 1 of 3, generate, ")
            folder = Path(post_mortem.removeprefix("post-mortem: "))
            tails.append("a last word" in (folder / "log_tail.txt").read_text())
    assert tails == [True, False]


def test_the_log_of_a_run_tells_where_its_post_mortem_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        pytest.raises(ZeroDivisionError) as caught,
        open_record(small_config(folder), resolved_yaml="") as record,
    ):
        record.live.phase("load data")
        raise ZeroDivisionError
    assert len(caught.value.__notes__) == 2
    assert caught.value.__notes__[-1] in (folder / "log.txt").read_text()
    assert caught.value.__notes__[-1].startswith(f"post-mortem: {folder}")


def test_a_resumed_run_names_its_step_before_it_begins(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    with open_record(config, resolved_yaml="") as record:
        for step in (1, 2):
            record.live.begin_step(step)
            record.record(step, {})
    with (
        pytest.raises(ZeroDivisionError) as caught,
        open_record(config, resolved_yaml="", resumes=True) as record,
    ):
        record.live.phase("start workers")
        raise ZeroDivisionError
    assert caught.value.__notes__[0].startswith("before step 3 of 3, start workers, ")


def test_a_start_that_somebody_stops_leaves_no_post_mortem(tmp_path: Path) -> None:
    for name, has_begun in (("start", False), ("step", True)):
        with (
            pytest.raises(RunInterrupted),
            open_record(small_config(tmp_path / name), resolved_yaml="") as record,
        ):
            record.live.phase("start workers")
            if has_begun:
                record.live.begin_step(1)
            raise RunInterrupted(signal.SIGINT)
        assert (tmp_path / name / "postmortem").exists() == has_begun


def test_a_refusal_that_says_it_all_leaves_no_post_mortem(tmp_path: Path) -> None:
    refusal = ConfigError("a.b", 1, rule="must be 2", fix="set a.b=2")
    assert not is_crash(refusal)
    with (
        pytest.raises(ConfigError),
        open_record(small_config(tmp_path / "run"), resolved_yaml=""),
    ):
        raise refusal
    assert not (tmp_path / "run" / "postmortem").exists()
