"""The server whose forks rehearse; one for all tests of a worker."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.rehearsal.cases import Case, Shown

Rehearse = Callable[[Case], Shown]


@pytest.fixture(scope="session")
def rehearse() -> Iterator[Rehearse]:
    """Execute a case in a fork, and return what it showed."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if server.stdin is None or server.stdout is None:
        raise AssertionError("pipes were asked for")
    questions, answers = server.stdin, server.stdout

    def ask(case: Case) -> Shown:
        pickle.dump(case, questions)
        questions.flush()
        shown: Shown | None = pickle.load(answers)
        assert shown is not None, "the process ended"
        return shown

    with server:  # closes the pipes, and waits
        yield ask
