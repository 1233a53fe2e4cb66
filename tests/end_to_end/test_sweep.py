from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.run.modes.sweep import SweepJob, build_jobs, run_sweep
from tests.command_line import Answer, call_main
from tests.end_to_end.small import SMALL
from tests.waiting import wait_until

_NOBODY = "127.0.0.1:9"


@pytest.mark.shows("R11.3")
def test_a_job_of_a_sweep_that_failed_is_named(tmp_path: Path) -> None:
    done = _multirun(tmp_path, f"cluster.ray_address={_NOBODY}", "seed=5")
    assert done.returncode == 1, done.stdout + done.stderr
    (sweep,) = (tmp_path / "sweeps").iterdir()
    address = f"cluster.ray_address={_NOBODY}: nothing listens at {_NOBODY}"
    assert f"failed: ResourceError: no Ray cluster answers at {address}" in done.stdout
    assert "cluster.ray_address=null" in done.stdout
    assert (sweep / "comparison.html").is_file()


def test_a_mistake_in_any_job_or_a_shared_folder_is_told_before_the_first_begins(
    tmp_path: Path,
) -> None:
    done = _multirun(tmp_path, "rollout.num_responses_per_prompt=4,1")
    assert done.returncode == 2, done.stderr
    assert "responses to the same prompt" in done.stderr
    assert not list(tmp_path.rglob("metrics.jsonl"))
    done = _multirun(tmp_path, "seed=0,1", "trainer.run_dir=mine")
    assert done.returncode == 2
    assert "hydra.sweep.dir=FOLDER" in done.stderr


def test_folders_are_named_after_what_jobs_do_not_share(tmp_path: Path) -> None:
    jobs = build_jobs(
        [["a.lr=1", "b.c=x/y z", "seed=0"], ["a.lr=2", "b.c=x/y z", "seed=0"]], folder=tmp_path
    )
    assert [job.folder.name for job in jobs] == ["0_lr=1", "1_lr=2"]
    assert [job.swept for job in jobs] == [("a.lr=1",), ("a.lr=2",)]
    [odd] = build_jobs([["b.c=x/y z"]], folder=tmp_path)
    assert odd.folder.name == "0"


@pytest.mark.shows("R11.4")
def test_a_job_that_a_signal_ends_takes_no_other_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = build_jobs([["seed=0"], ["seed=1"], ["seed=2"]], folder=tmp_path)
    programs = ["import os; os.kill(os.getpid(), 9)", "pass", "raise SystemExit(3)"]

    def command(job: SweepJob) -> list[str]:
        if job.number < 2:  # the last one ends before it has a folder
            job.folder.mkdir(parents=True)
            line = {"step": 3, "eval/reward/mean": 0.5 + job.number}
            (job.folder / "metrics.jsonl").write_text(json.dumps(line) + '\n{"step": 4, "ev')
            (job.folder / "config.yaml").write_text(f"seed: {job.number}\n")
        return [sys.executable, "-c", programs[job.number]]

    assert run_sweep(jobs, folder=tmp_path, command=command) == 1
    said = capsys.readouterr().out
    assert "0 (seed=0): failed: ended by SIGKILL, eval/reward/mean 0.5 after step 3\n" in said
    assert "1 (seed=1): done, eval/reward/mean 1.5 after step 3\n" in said
    assert "2 (seed=2): failed: exit status 3, see above\n" in said
    assert f"compared: {tmp_path / 'comparison.html'}" in said
    assert "2 runs compared" in (tmp_path / "comparison.html").read_text()


@pytest.mark.shows("R4.4")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGINT, 1))],
)
def test_stopping_a_sweep_lets_its_job_end_and_begins_no_other(
    tmp_path: Path, number: signal.Signals
) -> None:
    program = f"""
import pathlib, signal, sys
from hybridrl.run.modes.sweep import build_jobs, run_sweep
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
folder = pathlib.Path({str(tmp_path)!r})
job = '''
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
pathlib.Path({str(tmp_path / "ready")!r}).touch()
time.sleep(60)
'''
jobs = build_jobs([["seed=0"], ["seed=1"]], folder=folder)
sys.exit(run_sweep(jobs, folder=folder, command=lambda _: [sys.executable, "-c", job]))
"""
    printed = tmp_path / "printed"
    with (
        printed.open("w") as output,
        subprocess.Popen([sys.executable, "-c", program], stdout=output) as process,
    ):
        wait_until((tmp_path / "ready").exists, deadline_s=120, process=process)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    assert f"to continue: the same command with hydra.sweep.dir={tmp_path}" in printed.read_text()
    assert "0 (seed=0): stopped\n1 of 2 runs were not started\n" in printed.read_text()


def _multirun(folder: Path, *arguments: str) -> Answer:
    """Sweep: each job is a process of its own in any case."""
    swept = f"hydra.sweep.dir={folder}/sweeps/s"
    return call_main("--multirun", *SMALL, *arguments, swept, folder=folder)
