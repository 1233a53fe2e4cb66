from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.batch import PromptBatch
from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import PhaseError
from hybridrl.sampler import Program, Sample, SamplingParams, T
from hybridrl.workers.rollout.buckets import Bucket, StagedBucket
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.arguments import ServingSpec
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.sglang.server import StartedServer
from hybridrl.workers.rollout.single_turn import single_turn
from tests.serving.processes import engine_processes
from tests.sglang import recorded_server
from tests.sglang.warm import below
from tests.workers.rollout.engines import make_prompts, rollout_config, sampling_params, stop

Body = dict[str, Any]

_POLL_S = 0.05


def server_of(engine: SGLangEngine) -> StartedServer:
    server = engine._server
    assert isinstance(server, StartedServer)
    return server


def schedulers_of(engine: SGLangEngine) -> list[psutil.Process]:
    return [each for each in below(server_of(engine).process.pid) if "scheduler" in each.name()]


def own_schedulers() -> list[psutil.Process]:
    """Those of all engines on devices of their own."""
    found = []
    for one in engine_processes():
        for each in below(one.pid):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if each.name().startswith("sglang::scheduler"):
                    found.append(each)
    return found


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """All get SIGSTOP; they go on at the end, unless they are gone."""
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def stopped_scheduler(engine: SGLangEngine) -> AbstractContextManager[None]:
    """Within this the server computes nothing, and answers HTTP all the same."""
    return stopped(schedulers_of(engine))


def stopped_server(engine: SGLangEngine) -> AbstractContextManager[None]:
    pid = server_of(engine).process.pid
    return stopped([psutil.Process(pid), *below(pid)])


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


MAX_CONTEXT_TOKENS = 96
_LONG = sampling_params(group=8, tokens=80)


def sglang_config(**changes: object) -> RolloutConfig:
    """A small server; idle, it leaves its core to the tests."""
    common: dict[str, object] = {
        "engine": "sglang",
        "start_timeout_s": 150.0,  # 25 s of CPU, on cores that are shared
        "request_timeout_s": 60.0,
        "stage_timeout_s": 30.0,
    }
    return replace(rollout_config(), **(common | changes))  # type: ignore[arg-type]


def server_spec(folder: Path, **changes: object) -> ServingSpec:
    returns_experts = bool(changes.pop("returns_experts", False))
    return ServingSpec(
        model_folder=folder,
        rollout=sglang_config(**changes),
        lora=None,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        seed=0,
        device="cpu",
        returns_experts=returns_experts,
    )


class MortalEngine(SGLangEngine):
    """Loses its server on entering a method, if a test says which."""

    dies_in = ""
    kill: Callable[[SGLangEngine], None] = staticmethod(kill_server)

    def run(self, program: Program[T]) -> T:
        if self.dies_in != "generate":
            return super().run(program)
        self.dies_in = ""
        with generating(self, make_prompts([5] * 25), _LONG) as call:
            self.kill(self)
            call.result()  # raises
        raise AssertionError("the server was killed, and answered")

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        self._die_if_due("load")
        super().load(staged, handles)

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        self._die_if_due("release")
        super().release(part, backup=backup)

    def _die_if_due(self, method: str) -> None:
        if self.dies_in == method:
            self.dies_in = ""
            self.kill(self)


@contextmanager
def running_engine(spec: ServingSpec) -> Iterator[MortalEngine]:
    engine = MortalEngine(spec, variables={})
    try:
        yield engine
    finally:
        engine.shutdown()


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def send(engine: SGLangEngine, bucket: Bucket) -> None:
    staged = engine.stage(bucket)
    try:
        engine.load(staged, [staged.make_handle()])
    finally:
        engine.release_buffers()


def sync(engine: SGLangEngine, weights: Mapping[str, Tensor], *, version: int) -> None:
    """Send all weights in two buckets, in the order of the life cycle without sleep."""
    stop(engine)
    tensors = list(weights.items())
    half = len(tensors) // 2
    for bucket in (tensors[:half], tensors[half:]):
        send(engine, bucket)
    engine.finish_update(version=version)
    engine.continue_generation()


def make_ready(engine: SGLangEngine, folder: Path) -> None:
    """Bring an engine that serves many tests back to a known state: awake, with these weights."""
    for part in MemoryTag:
        with suppress(PhaseError):  # it is resident
            engine.resume(part)
    sync(engine, weights_of(folder), version=0)


@contextmanager
def recorded_engine(
    spec: ServingSpec,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: Mapping[str, object] | None = None,
) -> Iterator[MortalEngine]:
    """An engine on a recorded server, which writes down what it gets."""
    monkeypatch.setattr("hybridrl.workers.rollout.sglang.server._CHILD", recorded_server.MODULE)
    monkeypatch.setenv("RECORDED_CALLS", str(calls))
    monkeypatch.setenv("RECORDED_CHANGES", json.dumps(changes or {}))
    with running_engine(spec) as engine:
        yield engine
