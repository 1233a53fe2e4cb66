from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, pathlib, sys
from hybridrl.run.supervise import driver_watchdog
with driver_watchdog("gone without a word", log_file=pathlib.Path(sys.argv[1])):
    {act}
"""


@pytest.mark.parametrize("act", ["os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_the_death_of_a_driver_is_reported_in_output_and_log(act: str, tmp_path: Path) -> None:
    done = _run(act, tmp_path / "log.txt")
    assert done.returncode != 0
    assert done.stderr == "gone without a word\n"
    assert (tmp_path / "log.txt").read_text() == "gone without a word\n"


@pytest.mark.parametrize("act", ["pass", "sys.exit(3)", "raise ValueError('known')"])
def test_an_end_that_python_knows_of_has_none(act: str, tmp_path: Path) -> None:
    done = _run(act, tmp_path / "log.txt")
    assert "gone without a word" not in done.stderr
    assert not (tmp_path / "log.txt").exists()


def _run(act: str, log_file: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(act=act), str(log_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
