"""Reports the end of a driver that Ray ended without an exception.

Ray ends the process of a driver from C++ when the raylet beside it, or the head, is gone. It does
so at once or after 60 s, depending on the driver's call at that moment (Ray 2.60), with exit
status 1 and without a message. A process of a few megabytes waits for that, and writes one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Reads until the driver closes the pipe; if it did so by dying, the last byte is missing.
_WATCH = """
import sys
if not sys.stdin.buffer.read():
    sys.stderr.write(sys.argv[2] + "\\n")
    with open(sys.argv[1], "a", encoding="utf-8") as log:
        log.write(sys.argv[2] + "\\n")
"""
_WAIT_S = 10.0


@contextmanager
def driver_watchdog(words: str, *, log_file: Path) -> Iterator[None]:
    """Write ``words`` to stderr and ``log_file`` if this process dies within the block.

    An exception is not a death: the code that catches it has the words.
    """
    command = [sys.executable, "-S", "-E", "-c", _WATCH, str(log_file.absolute()), words]
    # A session of its own: Ctrl-C in the terminal is for the driver.
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watch.communicate(b"ended", timeout=_WAIT_S)
