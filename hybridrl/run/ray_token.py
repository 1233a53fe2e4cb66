"""The token of a Ray that is started here: a process that reads it may run code as this user."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from hybridrl import env

log = logging.getLogger(__name__)

_ELSEWHERE = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PRIVATE = 0o600


def keep_token_private() -> None:
    """Make the token's file before Ray would, readable by its owner alone.

    Ray (2.60) makes it as any file, which on most machines everybody may read. An existing file is
    left unchanged; if others may read it, the log warns. A home folder that cannot be written is
    left to Ray.
    """
    if env.get("RAY_AUTH_MODE", "token").lower() != "token" or any(map(env.get, _ELSEWHERE)):
        return
    path = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            _warn_of_readers(path)
        else:
            _write_token(path)


def _write_token(path: Path) -> None:
    # Atomically: another Ray may start at this moment, and would read an empty file.
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was faster; both use its token
            path.hardlink_to(unfinished)
    finally:
        unfinished.unlink(missing_ok=True)


def _warn_of_readers(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "others may read %s (mode %o), and run code as you wherever Ray runs; chmod 600 %s",
            *(path, mode, path),
        )
