"""Ends the driver at once when its own Ray ends.

Ray does the same from C++, 0 to 60 s after the raylet beside the driver is gone (Ray 2.60). Until
then calls fail, and workers would be started again in a cluster that is ending.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Thread

from hybridrl.processes import guard

log = logging.getLogger(__name__)

RAY_PROCESSES = ("gcs_server", "raylet")
"""Processes that a Ray on one machine needs."""


@contextmanager
def ended_with_ray() -> Iterator[None]:
    """End this process, with status 1 and no exception, if a process of its Ray ends in the block.

    Leave the block before ``ray.shutdown()``.
    """
    names = {pid: guard.process_name(pid) for pid in guard.descendants()}
    watched = {os.pidfd_open(pid): name for pid, name in names.items() if name in RAY_PROCESSES}
    stop = os.eventfd(0)
    thread = Thread(target=_watch, args=(watched, stop), name="ray processes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(stop, 1)
        thread.join()
        for descriptor in (*watched, stop):
            os.close(descriptor)


def _watch(watched: Mapping[int, str], stop: int) -> None:
    poll = select.poll()
    for descriptor in (*watched, stop):
        poll.register(descriptor, select.POLLIN)
    ended = {descriptor for descriptor, _ in poll.poll()}
    if stop not in ended:
        names = " and ".join(sorted(watched[descriptor] for descriptor in ended))
        log.error("Ray's %s ended: it was killed, or ran out of memory; the driver ends", names)
        os._exit(1)
