"""Run a function on real gloo ranks, one process each: ``run_ranks(2, check)``.

The processes are forked from a server that has imported torch and the training engines once, so two
ranks start in a fraction of a second instead of in two imports. The server ends with the session.
It has megatron-core too, with its stand-ins: they change what megatron sees, and nothing else.
"""

from __future__ import annotations

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

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    ["hybridrl.workers.train.lora", "tests.ranks", "tests.megatron.preloaded"]
)
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

    Args:
        num_ranks: world size.
        fn: a function of a module (it travels by reference), not a lambda or a local function.
        args: picklable; every rank gets the same.
        deadline_s: seconds from the start of the processes to the last answer.

    Returns:
        What each rank returned, by rank. Tensors come back as copies.

    Raises:
        RankFailed: a rank raised (with its traceback), died (with its exit code) or was late.
    """
    # The store lives in this process, on a port the kernel chose: two runs cannot collide.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    environment = _ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    try:
        for rank in range(num_ranks):
            ours, theirs = _FORKSERVER.Pipe(duplex=False)
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
            }
            process = _FORKSERVER.Process(
                target=_rank_main, args=(theirs, dict(environment), deadline_s, fn, args)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _gather(pipes, processes, deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


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


def _rank_main(
    pipe: Connection,
    environment: dict[str, str],
    deadline_s: float,
    fn: Callable[..., object],
    args: tuple[object, ...],
) -> NoReturn:
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(deadline_s - 1.0, 0.5))  # where a late rank hangs
    rank = int(environment["RANK"])
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=deadline_s))
        answer = pickle.dumps((None, fn(rank, *args)))
    except BaseException:
        answer = pickle.dumps((traceback.format_exc(), None))
    pipe.send_bytes(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Past destroy_process_group: after a failure it can wait for peers that will never come.
    os._exit(0)
