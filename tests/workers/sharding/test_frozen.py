from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybridrl.config.serving import PlacedGroup, ServerGroupConfig
from hybridrl.config.topology import LedDevices
from hybridrl.errors import EngineError
from hybridrl.workers.sharding.control import StageError
from tests.ranks import run_ranks
from tests.workers.sharding.recording import WEIGHTS, RecordingDevice, recording_device

JUDGE = PlacedGroup("judge", "main", ServerGroupConfig(num_devices=1), 1)


def device_of(rank: int, folder: Path) -> RecordingDevice:
    """Rank 0 owns the engine of the policy, rank 1 that of a judge."""
    engines = (LedDevices(range(1)), LedDevices(range(1, 2), JUDGE, folder))
    return recording_device(rank, engines=engines, sleep=True, verify_weights="never")


def require_weights(device: RecordingDevice, rank: int) -> None:
    assert device.engine is not None
    served = device.engine.serve()
    for name, size in WEIGHTS.items():
        expected = 100.0 if rank else size + device.version
        assert served[name].tolist() == [expected] * size


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    weights = {name: torch.full((size,), 100.0) for name, size in WEIGHTS.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def _three_cycles(rank: int, folder: Path) -> list[list[str]]:
    device = device_of(rank, folder)
    assert device.engine is not None
    by_cycle = []
    for _ in range(3):
        device.journal.events.clear()
        with device.manager.rollout_phase():
            require_weights(device, rank)
        require_weights(device, rank)  # it answers until the trainer computes
        device.train()
        with pytest.raises(EngineError, match="is paused"):
            device.engine.serve()
        by_cycle.append(device.journal.calls(rank))
    return by_cycle


@pytest.mark.shows("2.1", "2.2", "4.3", "4.11")
def test_a_judge_reads_its_folder_once_and_comes_back_from_the_host(judge: Path) -> None:
    by_rank = run_ranks(2, _three_cycles, judge)
    for calls in (calls for of_rank in by_rank for calls in of_rank):
        order = ["resume weights", "resume kv_cache", "continue_generation", "pause", "drain"]
        places = [calls.index(call) for call in [*order, "release kv_cache"]]
        assert places == sorted(places)
    policy, of_judge = (["load" in calls for calls in of_rank] for of_rank in by_rank)
    assert (policy, of_judge) == ([True, True, True], [True, False, False])


def _lose_the_judge(rank: int, folder: Path) -> list[str]:
    device = device_of(rank, folder)
    endings = []
    for cycle in range(4):
        if rank == 1 and cycle == 1:
            device.journal.fail(1, "resume", "weights")
        if rank == 1 and cycle == 2:
            device.journal.fail(1, "release", "weights", when="after")
        try:
            with device.manager.rollout_phase():
                require_weights(device, rank)
            endings.append("well")
        except StageError as error:
            endings.append(str(error))
        device.train()
    return endings


@pytest.mark.shows("4.11", "4.12")
def test_a_judge_that_failed_is_started_again_and_reads_its_folder(judge: Path) -> None:
    first, second = run_ranks(2, _lose_the_judge, judge)
    assert first == second
    assert first[0] == first[2] == first[3] == "well"
    assert first[1].startswith("resume_weights failed on engine 1: InjectedFault: resume weights")
