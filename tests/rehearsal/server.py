"""Forks a process for each rehearsal: ``python -m tests.rehearsal.server``.

A rehearsal changes its process for good, and to import torch and the workers takes 8 s of CPU. So
they are imported once, here, and each case that comes on standard input runs in a fork.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from importlib import import_module

_PRELOADED = ("hybridrl.workers.train.fsdp2", "transformers.models.qwen3.modeling_qwen3")


def main() -> None:
    """Answer until standard input ends."""
    import_module("hybridrl.rehearsal.server").stand_in_for_package()
    rehearse = import_module("tests.rehearsal.child").rehearse
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    while True:
        try:
            case = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        read, write = os.pipe()
        if not os.fork():
            with os.fdopen(write, "wb") as out:
                pickle.dump(rehearse(case), out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as source:
            answers.write(source.read() or pickle.dumps(None))
        answers.flush()
        os.wait()
        if os.environ.get("T"): import resource; r=resource.getrusage(resource.RUSAGE_CHILDREN); print("cpu", r.ru_utime, r.ru_stime, resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)


if __name__ == "__main__":
    main()
