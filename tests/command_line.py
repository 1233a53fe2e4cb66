"""The command within this process: what it answers, without the seconds that a process takes."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybridrl.main import main


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def call_main(*arguments: str, folder: Path) -> Answer:
    """Do what ``python -m hybridrl.main ARGUMENTS`` does in ``folder``.

    For commands that only answer: a run takes the process over.
    """
    status = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        patch.chdir(folder)
        patch.setattr("sys.argv", ["hybridrl.main", *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "1")  # main sets it; here it goes again
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return Answer(status, stdout.getvalue(), stderr.getvalue())
