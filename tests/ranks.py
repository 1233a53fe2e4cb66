"""Run a function on real gloo ranks, one process each: ``run_ranks(2, check)``.

The processes are forked from a server that has imported torch and the training engines once, so two
ranks start in a fraction of a second instead of in two imports. The server ends with the session.
It has megatron-core too, with its stand-ins: they change what megatron sees, and nothing else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import torch
import torch.distributed as dist

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    [
        *("hybridrl.models.adapter", "tests.ranks", "tests.megatron.preloaded"),
        # What the modules of most checks import, else 0.8 s of CPU in each rank.
        *("pytest", "hypothesis.strategies", "tests.contract.ranks_under_test"),
        *("tests.contract.plain", "tests.workers.device", "tests.frozen"),
    ]
)
"""Its processes are forked from the server of the ranks, which has imported all that."""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # As under torchrun: every rank, 0 too, joins the store of the parent instead of opening one.
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


class RankFailed(AssertionError):
    """A rank raised, died or was late; holds the traceback of the first one that did."""


def run_ranks(
    num_ranks: int, fn: Callable[..., Any], *args: object, deadline_s: float = 90.0
) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``num_ranks`` processes joined in one gloo process group.

    ``fn`` is a function of a module (it travels by reference). Tensors come back as copies. A rank
    that raised, died or was late is a RankFailed.
    """
    with RankPool(num_ranks, deadline_s=deadline_s) as pool:
        return pool.run(fn, *args)


class RankPool:
    """Ranks that stay between calls, so that many small checks pay for one start.

    After a call that failed the ranks are gone, since they may be out of step; the next call starts
    new ones.
    """

    def __init__(self, num_ranks: int, *, deadline_s: float = 90.0) -> None:
        self._num_ranks = num_ranks
        self._deadline_s = deadline_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Call ``fn(rank, *args)`` on every rank; see ``run_ranks``."""
        try:
            if not self._processes:
                self._start()
            call = pickle.dumps((fn, args))
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):  # it died; its answer says of what
                    pipe.send_bytes(call)
            return _gather(self._pipes, self._processes, self._deadline_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        # The store lives in this process, on a port the kernel chose: two runs cannot collide.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self._num_ranks):
            ours, theirs = FORKSERVER.Pipe(duplex=True)
            environment = _ENVIRONMENT | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._num_ranks),
                "LOCAL_WORLD_SIZE": str(self._num_ranks),
            }
            process = FORKSERVER.Process(
                target=_rank_main, args=(theirs, environment, self._deadline_s)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _gather(pipes: list[Connection], processes: list[BaseProcess], deadline_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + deadline_s
    while len(answers) < len(pipes):
        late = [rank for rank in range(len(pipes)) if rank not in answers]
        ready = wait([pipes[rank] for rank in late], timeout=deadline - time.monotonic())
        if not ready:
            raise RankFailed(f"ranks {late} did not answer within {deadline_s} s")
        for rank in late:
            if pipes[rank] in ready:
                answers[rank] = _receive(rank, pipes[rank], processes[rank])
    return [answers[rank] for rank in range(len(pipes))]


def _receive(rank: int, pipe: Connection, process: BaseProcess) -> object:
    try:
        failure, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5.0)
        raise RankFailed(f"rank {rank} died: exit code {process.exitcode}") from None
    if failure:
        raise RankFailed(f"rank {rank} failed:\n{failure}")
    return value


def _rank_main(pipe: Connection, environment: dict[str, str], deadline_s: float) -> NoReturn:
    os.environ.update(environment)
    torch.set_num_threads(1)
    is_joined, failure = False, None
    while failure is None:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        faulthandler.dump_traceback_later(max(deadline_s - 1.0, 0.5))  # where a late rank hangs
        try:
            if not is_joined:
                dist.init_process_group("gloo", timeout=timedelta(seconds=deadline_s))
                is_joined = True
            answer = pickle.dumps((None, fn(int(environment["RANK"]), *args)))
        except BaseException:
            failure = traceback.format_exc()
            answer = pickle.dumps((failure, None))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Past destroy_process_group: after a failure it can wait for peers that will never come.
    os._exit(0)
