from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from hybridrl.errors import DeadlineError, EngineError, PhaseError
from hybridrl.metrics import Sum
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang import engine as sglang
from hybridrl.workers.rollout.sglang.client import ControlClient, RefusedError
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from tests.sglang.engines import (
    MortalEngine,
    generating,
    kill_scheduler,
    kill_server,
    server_of,
    sglang_config,
    stopped_scheduler,
    stranger_asks,
    wait_until_running,
)
from tests.sglang.warm import below
from tests.workers.device import Device
from tests.workers.rollout.engines import CPU, make_prompts, sampling_params, stop, tokens_of
from tests.workers.train.engines import build_fsdp2

NUM_REQUESTS = 120
PROMPTS = make_prompts([3 + place % 5 for place in range(NUM_REQUESTS // 8)])
FEW = make_prompts((4, 9))
NUM_CYCLES = 2
GREEDY = sampling_params(group=1, tokens=6, temperature=0.0)
SHORT_TIMEOUT_S = 3.0


def managed(engine: SGLangEngine, *, drain_timeout_s: float) -> ManagedEngine:
    config = sglang_config(drain_timeout_s=drain_timeout_s, sleep=True)
    return ManagedEngine(engine, config=config, device=CPU)


def require_serving(engine: SGLangEngine) -> None:
    found = [tokens_of(engine.run(single_turn(FEW, GREEDY))) for _ in range(2)]
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0])


@pytest.mark.shows("2.9")
@pytest.mark.timeout(200)
def test_all_requests_under_drain_are_answered_or_reported(engine: SGLangEngine) -> None:
    for _ in range(2):
        impatient = managed(engine, drain_timeout_s=0.3)
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=80)) as call:
            impatient.pause()
            impatient.drain()
            with pytest.raises(EngineError, match=f"aborted [0-9]+ of {NUM_REQUESTS} requests"):
                call.result()
        aborted = impatient.take_metrics()["rollout/aborted_requests"]
        assert isinstance(aborted, Sum)
        assert 0 < aborted.value <= NUM_REQUESTS
        impatient.release_cache()
        assert impatient.take_metrics()["memory/noop_releases"] == Sum(2)
        impatient.resume_cache()
        impatient.continue_generation()
        patient = managed(engine, drain_timeout_s=100.0)
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=20)) as call:
            patient.pause()
            patient.drain()
            assert [len(r.token_ids) for r in call.result()] == [20] * NUM_REQUESTS
        assert "rollout/aborted_requests" not in patient.take_metrics()
        patient.continue_generation()


@pytest.mark.shows("1.19")
@pytest.mark.timeout(150)
def test_requests_that_a_stranger_cuts_off_are_asked_for_again(engine: SGLangEngine) -> None:
    with generating(engine, PROMPTS, sampling_params(group=8, tokens=30)) as call:
        server_of(engine).post("/abort_request", abort_all=True)
        assert [len(r.token_ids) for r in call.result()] == [30] * NUM_REQUESTS
    retried = engine.take_metrics()["rollout/retried_requests"]
    assert isinstance(retried, Sum)
    assert retried.value > 0


@pytest.mark.shows("2.10")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", ["in_place", pytest.param("retract", marks=pytest.mark.nightly)])
def test_requests_that_a_strangers_pause_keeps_are_reported(
    engine: SGLangEngine, mode: str
) -> None:
    for _ in range(2):
        with generating(engine, PROMPTS, sampling_params(group=8, tokens=80)) as call:
            server_of(engine).post("/pause_generation", mode=mode)
            engine.pause()
            assert engine.drain(timeout_s=0.3) > 0
            with pytest.raises(EngineError, match="aborted"):
                call.result()
        engine.continue_generation()
        require_serving(engine)


@pytest.mark.shows("2.9")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("mode", [pytest.param("in_place", marks=pytest.mark.nightly), "retract"])
def test_a_strangers_endless_request_does_not_hold_up_the_drain(
    engine: SGLangEngine, mode: str
) -> None:
    for _ in range(2):
        with ThreadPoolExecutor(max_workers=1) as pool:
            theirs = pool.submit(stranger_asks, engine, num_requests=NUM_REQUESTS)
            wait_until_running(engine, theirs)
            server_of(engine).post("/pause_generation", mode=mode)
            engine.pause()
            assert engine.drain(timeout_s=0.3) == 0
            reasons = {each["meta_info"]["finish_reason"]["type"] for each in theirs.result()}
            assert "abort" in reasons
        engine.continue_generation()
        require_serving(engine)


@pytest.mark.shows("2.8")
@pytest.mark.timeout(150)
def test_a_scheduler_that_hangs_is_named_and_may_come_back(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "FLUSH_TIMEOUT_S", SHORT_TIMEOUT_S)
    monkeypatch.setattr(sglang, "ABORT_GRACE_S", SHORT_TIMEOUT_S)
    for _ in range(2):
        sampling = sampling_params(group=8, tokens=80)
        with generating(engine, PROMPTS, sampling) as call, stopped_scheduler(engine):
            engine.pause()
            with pytest.raises(DeadlineError, match=r"still busy 3 s.*requests running and"):
                engine.drain(timeout_s=0.3)
            with pytest.raises(EngineError, match=f"aborted [0-9]+ of {NUM_REQUESTS}"):
                call.result()
        assert engine.drain(timeout_s=10.0) == 0
        engine.continue_generation()
        require_serving(engine)


@pytest.mark.timeout(150)
def test_only_a_server_that_makes_no_token_is_late(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = replace(engine._spec.rollout, request_timeout_s=3.0)
    monkeypatch.setattr(engine, "_spec", replace(engine._spec, rollout=limit))
    sampling, begin = sampling_params(group=24, tokens=80), time.monotonic()
    with generating(engine, PROMPTS, sampling) as call:
        assert {len(r.token_ids) for r in call.result()} == {80}
    assert time.monotonic() - begin > limit.request_timeout_s
    late = pytest.raises(DeadlineError, match=r"no progress within rollout\.request_timeout_s=3")
    with generating(engine, PROMPTS, sampling) as call, stopped_scheduler(engine), late:
        call.result(30.0)
    require_serving(engine)


EXIT_TIMEOUT_S = 30


@pytest.fixture
def device(engine: MortalEngine, served_model: Path) -> Iterator[Device]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Device(
            engine, build_fsdp2(served_model), config=sglang_config(), prompts=FEW, sampling=GREEDY
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.shows("4.15")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("method", "kill"),
    [
        ("generate", kill_scheduler),
        pytest.param("load", kill_server, marks=pytest.mark.nightly),
        pytest.param("release", kill_server, marks=pytest.mark.nightly),
    ],
)
def test_a_server_killed_in_a_stage_is_named_and_replaced(
    device: Device, method: str, kill: Callable[[SGLangEngine], None]
) -> None:
    before = [tokens_of(device.sample()) for _ in range(NUM_CYCLES)]
    assert before[0] == before[1]
    device.engine.dies_in, device.engine.kill = method, kill
    if method == "release":  # the responses are there already; what is broken is mended at once
        assert tokens_of(device.sample()) == before[0]
        assert device.engine.dies_in == ""
    else:
        device.manager.weights_changed(version=7)
        with pytest.raises((EngineError, StageError), match=r"SGLang|sync failed on engine 0"):
            tokens_of(device.sample())
    after = [tokens_of(device.sample()) for _ in range(NUM_CYCLES)]
    assert after == before
    assert device.manager._life.states == (State.ASLEEP,)
    device.manager.require_training()


CHILD = """
import sys
from pathlib import Path
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.engines import server_spec
SGLangEngine(server_spec(Path(sys.argv[1])), variables={})
"""


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_no_process_is_left_of_a_server_whose_worker_is_killed(served_model: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", CHILD, str(served_model)])
    try:
        family: list[psutil.Process] = []
        while not any("scheduler" in process.name() for process in family):
            assert worker.poll() is None
            time.sleep(0.2)
            family = living(psutil.Process(worker.pid).children(recursive=True))
    finally:
        worker.kill()
        worker.wait()
    _, left = psutil.wait_procs(family, timeout=EXIT_TIMEOUT_S)
    assert living(left) == []


def living(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run: one that nobody has waited for is no process any more."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.shows("3.6")
def test_generate_is_refused_while_a_part_is_released(engine: SGLangEngine) -> None:
    before = tokens_of(engine.run(single_turn(FEW, GREEDY)))
    for part in [*MemoryTag] * NUM_CYCLES:
        stop(engine)
        engine.release(part)
        engine.continue_generation()
        with pytest.raises(PhaseError, match=f"{part.name} is released"):
            engine.run(single_turn(FEW, GREEDY))
        # Past our door: on a GPU an illegal access, here an answer as if nothing was.
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
        assert len(engine._server.client.call("/generate", body, timeout_s=60.0)["output_ids"]) == 2
        stop(engine)
        engine.resume(part)
        engine.continue_generation()
        assert tokens_of(engine.run(single_turn(FEW, GREEDY))) == before


@contextmanager
def stranger(engine: SGLangEngine, key: str) -> Iterator[ControlClient]:
    server = server_of(engine)
    url = f"http://127.0.0.1:{server.info['port']}"
    client = ControlClient(url, name="it", require_alive=server.process.require_alive, key=key)
    try:
        yield client
    finally:
        client.close()


def test_a_server_serves_nobody_without_its_key_which_no_command_line_shows(
    engine: SGLangEngine,
) -> None:
    calls = {
        "/server_info": "GET",
        "/generate": "POST",
        "/update_weights_from_disk": "POST",
        "/load_lora_adapter_from_tensors": "POST",
        "/release_memory_occupation": "POST",
    }
    for key in ("", "guessed"):
        with stranger(engine, key) as client:
            for path, method in calls.items():
                with pytest.raises(RefusedError) as refused:
                    client.call(path, {}, timeout_s=10.0, method=method)
                assert refused.value.status == 401
    pid = server_of(engine).process.pid
    commands = [each.cmdline() for each in (psutil.Process(pid), *below(pid))]
    key = server_of(engine).client.key
    assert len(key) >= 32
    assert not [command for command in commands if any(key in word for word in command)]
