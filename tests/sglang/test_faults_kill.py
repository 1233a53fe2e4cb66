"""A server that is killed is named, restarted by the life cycle, and the next phase works."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from tests.sglang.engines import MortalEngine, sglang_config
from tests.sglang.strangers import kill_scheduler, kill_server
from tests.workers.device import Device
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of
from tests.workers.train.engines import build_fsdp2

PROMPTS = make_prompts((4, 9))
GREEDY = sampling_params(group=1, tokens=6, temperature=0.0)
NUM_CYCLES = 2
EXIT_TIMEOUT_S = 30


@pytest.fixture
def device(engine: MortalEngine, served_model: Path) -> Iterator[Device]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Device(
            engine,
            build_fsdp2(served_model),
            config=sglang_config(),
            prompts=PROMPTS,
            sampling=GREEDY,
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
