from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from hybridrl.diagnostics.activity import RecordFiles, start_ticks
from hybridrl.diagnostics.process_report import (
    MonitoredRank,
    RankReport,
    describe_ranks,
    failed_ranks_first,
    read_ranks,
)
from tests.waiting import wait_until

_BEGIN = """
import ctypes, faulthandler, json, sys, time
from dataclasses import asdict
from pathlib import Path
from hybridrl.diagnostics import activity
from hybridrl.diagnostics.activity import gauge, scope

faulthandler.enable()
files = activity.start_recording(Path(sys.argv[1]))

def say_ready():
    print(json.dumps(asdict(files)), flush=True)

def spin():
    say_ready()
    while True:
        pass

def nap():
    say_ready()
    time.sleep(600)
"""

Start = Callable[[str], MonitoredRank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that runs the given lines; it goes on when it has said that it is ready."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(lines: str) -> MonitoredRank:
        rank = len(processes)
        command = [sys.executable, "-c", _BEGIN + lines, str(tmp_path)]
        errors = (tmp_path / f"stderr.{rank}").open("w")
        with errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        processes.append(process)
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        return MonitoredRank(
            rank, "host-a", "node", RecordFiles(**told | {"logs": (*told["logs"],)})
        )

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def _look(*ranks: MonitoredRank, wait_s: float = 5.0) -> list[RankReport]:
    return read_ranks(ranks, wait_s=wait_s)


def test_a_loop_is_found_with_its_function_line_and_block(start: Start) -> None:
    rank = start("with scope('update()'):\n    spin()")
    wait_until(lambda: "in say_ready" not in _look(rank)[0].stacks)
    for _ in range(2):  # the second look does not show the stacks of the first
        [report] = _look(rank)
        assert report.state == "running"
        assert [what for what, _ in report.doing] == ["update()"]
        assert report.top.startswith("spin (<string>:")
        assert report.stacks.count("in spin") == 1
        assert "in _sample" in report.stacks  # all threads
        assert not report.waits


def test_open_blocks_are_told_from_closed_ones(start: Start) -> None:
    [idle, busy, short] = _look(
        start("with scope('update()'):\n    pass\nnap()"),
        start("with scope('generate()'), scope('sync', waits=True):\n    nap()"),
        start("with scope('a' * 200):\n    pass\nwith scope('sync \"é\"'):\n    nap()"),
    )
    assert idle.where == "idle, after update()"
    assert [what for what, _ in busy.doing] == ["generate()", "sync"]
    assert (idle.waits, busy.waits) == (False, True)
    assert "waits for other ranks in generate() for" in busy.describe()
    assert [what for what, _ in short.doing] == ['sync "é"']  # nothing is left of the longer one
    assert json.dumps(asdict(short))  # another machine sends it to the driver


def test_what_is_watched_is_written_while_the_process_is_stuck(start: Start) -> None:
    rank = start("with gauge('engine', lambda: '3 running'):\n    spin()")
    wait_until(lambda: _look(rank)[0].notes == {"engine": "3 running"})
    assert _look(rank)[0].describe().endswith("; engine: 3 running")


def test_a_stopped_process_is_reported_in_time_without_stacks(start: Start) -> None:
    rank = start("with scope('update()'):\n    nap()")
    psutil.Process(rank.files.pid).suspend()
    [report] = _look(rank, wait_s=0.2)
    assert (report.state, report.stacks) == ("stopped by a signal", "")
    assert report.where.startswith("update() for")


def test_the_record_outlives_a_killed_process(start: Start) -> None:
    rank = start("with scope('update()'), scope('all_reduce', waits=True):\n    nap()")
    wait_until(lambda: len(_look(rank)[0].memory) >= 2)
    psutil.Process(rank.files.pid).kill()
    wait_until(lambda: _look(rank)[0].is_gone)
    [report] = _look(rank)
    assert report.exit.startswith(("without a word", "the kernel killed"))
    assert [what for what, _ in report.doing] == ["update()", "all_reduce"]
    assert not report.waits  # the dead wait for nobody
    assert all(resident > 2**20 for _, resident, _ in report.memory)


def test_a_crash_in_c_code_is_read_from_what_it_wrote(start: Start, tmp_path: Path) -> None:
    rank = start("say_ready()\nctypes.string_at(0)")
    # Not by looking: a look asks for stacks, and faulthandler writes nothing of a crash that
    # comes while another thread answers.
    wait_until(lambda: psutil.Process(rank.files.pid).status() == psutil.STATUS_ZOMBIE)
    [report] = _look(rank)
    assert report.exit == "Segmentation fault"
    assert "string_at" in report.log_tail


def test_a_process_with_the_pid_of_a_dead_rank_gets_no_signal(start: Start) -> None:
    rank = start("nap()")
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        files = replace(rank.files, pid=stranger.pid)
        assert files.start_ticks != 0
        if start_ticks(stranger.pid) == files.start_ticks:
            files = replace(files, start_ticks=files.start_ticks - 1)
        [report] = _look(replace(rank, files=files), wait_s=0.2)
        assert report.is_gone
        assert stranger.poll() is None
    finally:
        stranger.kill()
        assert stranger.wait() == -signal.SIGKILL


def test_the_odd_one_out_is_named_first() -> None:
    def report(rank: int, **what: object) -> RankReport:
        known = {"host": "a", "pid": 1, "state": "sleeping", "waits": True, "top": "reduce"}
        return RankReport(rank=rank, **known | what)  # type: ignore[arg-type]

    at_the_same_place = [report(rank) for rank in range(3)]
    answered = report(9, waits=False)
    loops = report(3, waits=False, state="running")
    elsewhere = report(4, top="barrier")
    dead = report(5, waits=False, state="gone", exit="exit code 3")
    ranks = [*at_the_same_place, answered, loops, elsewhere, dead]
    found = failed_ranks_first(ranks, late=range(5))
    assert [one.rank for one in found] == [5, 3, 4, 0, 1, 2]
    assert (
        describe_ranks(found).splitlines()[1]
        == "  rank 5 (a, pid 1, gone: exit code 3): idle, at reduce"
    )
    assert describe_ranks(found * 2).endswith("and 4 more ranks")
