"""Others who talk to a server of ours behind our back: requests, pauses, signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil

from hybridrl.batch import PromptBatch
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.server import StartedServer
from hybridrl.workers.rollout.single_turn import single_turn

Body = dict[str, Any]

_POLL_S = 0.05


def server_of(engine: SGLangEngine) -> StartedServer:
    server = engine._server
    assert isinstance(server, StartedServer)
    return server


def schedulers_of(engine: SGLangEngine) -> list[psutil.Process]:
    """The processes that compute; the server's own one only answers HTTP."""
    children = psutil.Process(server_of(engine).process.pid).children(recursive=True)
    return [child for child in children if "scheduler" in child.name()]


@contextmanager
def stopped_scheduler(engine: SGLangEngine) -> Iterator[None]:
    """Within this the server computes nothing, and answers HTTP all the same."""
    processes = schedulers_of(engine)
    assert processes
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGCONT)


def kill_server(engine: SGLangEngine) -> None:
    """As the out-of-memory killer does: one process, without a word."""
    os.kill(server_of(engine).process.pid, signal.SIGKILL)


def kill_scheduler(engine: SGLangEngine) -> None:
    schedulers_of(engine)[0].kill()


def stranger_asks(engine: SGLangEngine, *, num_requests: int) -> list[Body]:
    """Requests that the engine knows nothing of, long ones; returns their answers."""
    answers: list[Body] = server_of(engine).client.call(
        "/generate",
        {
            "input_ids": [[1, 2, 3]] * num_requests,
            "sampling_params": {"max_new_tokens": 90, "ignore_eos": True},
        },
        timeout_s=60.0,
    )
    return answers


def wait_until_running(engine: SGLangEngine, call: Future[Any]) -> None:
    """Return once a request of a call has been given its place on the server, or it has ended."""
    while not call.done():
        state = server_of(engine).client.call("/v1/loads", timeout_s=10.0, method="GET")
        if any(load["num_running_reqs"] for load in state["loads"]):
            return
        time.sleep(_POLL_S)


@contextmanager
def generating(
    engine: SGLangEngine, prompts: PromptBatch, sampling: SamplingParams
) -> Iterator[Future[list[Sample]]]:
    """A generate call in another thread, as Ray and evaluation may have one; it runs on entry."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        call = pool.submit(engine.run, single_turn(prompts, sampling))
        wait_until_running(engine, call)
        yield call
