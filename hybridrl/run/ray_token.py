"""The token with which a Ray started here knows its own: whoever can read it may run code as us."""

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

    Ray (2.60) makes it as any file, which on most machines everybody may read. One that is there
    is left as it is; if others may read it, the log says so. A home that cannot be written is left
    to Ray.
    """
    if env.get("RAY_AUTH_MODE", "token").lower() != "token" or any(map(env.get, _ELSEWHERE)):
        return
    path = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        except FileExistsError:
            _warn_of_readers(path)
            return
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def _warn_of_readers(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning(
            "others may read %s (mode %o), and run code as you wherever Ray runs; chmod 600 %s",
            *(path, mode, path),
        )
