"""Logging set-up: one format everywhere; the handler, not the caller, adds rank and phase."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

SERVER_LOGS = "servers"
"""Folder of a run folder with the logs of the rollout manager and of the engines' processes."""

MANAGER = "manager"
"""Process whose log has the events of lost engines."""

_FORMAT = "%(asctime)s %(levelname).1s %(where)s%(name)s: %(message)s"
_CHATTER = (
    "torch.fx._symbolic_trace",  # FSDP2 itself calls a function that it marks as deprecated
    "ray._private.authentication.authentication_token_setup",  # that a default is in force
)
"""Loggers whose warnings no user of ours can act on."""

_where: ContextVar[str] = ContextVar("where", default="")


class _AddWhere(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.where = _where.get()
        return True


class _PresentStderr:
    """Whatever ``sys.stderr`` is at the time: a live table replaces it while it is shown."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class _LogFile(logging.Handler):
    """Appends lines to a file. After a failed write it reports once, and stops."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("ab", buffering=0)  # nothing stays behind for a later flush
        self._is_broken = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_broken:
            return
        try:
            self._file.write(self.format(record).encode(errors="replace") + b"\n")
        except OSError as error:
            self._is_broken = True
            with suppress(OSError):  # of the same disk, perhaps
                sys.stderr.write(f"{self._path} is not written any more: {error}\n")

    def close(self) -> None:
        self._file.close()
        super().close()


def set_where(where: str) -> None:
    """Prefix each later line of this process, for example with ``rank 3 on host-a``."""
    _where.set(f"[{where}] " if where else "")


def configure(*, file: Path | None = None) -> None:
    """Send hybridrl's log to stderr and, if given, to ``file``. Calling it again replaces both."""
    logger = logging.getLogger("hybridrl")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(_PresentStderr())]
    if file is not None:
        handlers.append(_LogFile(file))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        handler.addFilter(_AddWhere())
        logger.addHandler(handler)


def configure_server(run_folder: Path, process: str) -> None:
    """Send the log of a process of the servers to a file of the run, and warnings to stderr, too.

    Servers without a run have no such folder, and log as before.
    """
    if run_folder.is_dir():
        folder = run_folder / SERVER_LOGS
        folder.mkdir(exist_ok=True)
        file = folder / f"{process.replace('/', '_')}.txt"
        configure(file=file)
        logging.getLogger("hybridrl").handlers[0].setLevel(logging.WARNING)


for _name in _CHATTER:
    logging.getLogger(_name).setLevel(logging.ERROR)
