"""Functions that the tests name in ``cluster.worker_setup_hook``."""

from __future__ import annotations

import os

calls: list[str] = []
no_function = 3


def remember() -> None:
    """Note that the hook ran, and what the environment said by then."""
    calls.append(os.environ["RANK"])


def fail() -> None:
    """Do what a hook with a mistake does."""
    raise LookupError("no kernel here")
