"""Forks a process for each rehearsal: ``python -m tests.rehearsal.server``.

A rehearsal changes its process for good, and to import torch and the workers takes 7 s of CPU. So
they are imported once, here, and each case that comes on standard input runs in a fork.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from importlib import import_module

_PRELOADED = (
    "hybridrl.workers.train.fsdp2",
    "hybridrl.rehearsal.megatron",
    "transformers.models.qwen3.modeling_qwen3",
)


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    import_module("hybridrl.rehearsal.server").stand_in_for_package()
    child = import_module("tests.rehearsal.child")
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()
    while True:
        try:
            case = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        child.compose(case)  # what cases have in common is read once
        read, write = os.pipe()
        if not os.fork():
            with os.fdopen(write, "wb") as out:
                pickle.dump(child.rehearse(case), out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as source:
            answers.write(source.read() or pickle.dumps(None))
        answers.flush()
        os.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
