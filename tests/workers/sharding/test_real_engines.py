"""The embedded rollout engine and the FSDP2 training engine on one device, in turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.train.protocol import TrainState
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.device import PROMPTS, SAMPLING, Device
from tests.workers.rollout.engines import rollout_config
from tests.workers.train.engines import CPU, build_fsdp2


def on_device(folder: Path, *, sleep: bool) -> Device:
    """One rank as a worker has it, with both real engines."""
    config = replace(rollout_config(), sleep=sleep)
    engine = HFRolloutEngine(folder, config=config, max_context_tokens=32, device=CPU)
    return Device(engine, build_fsdp2(folder), config=config)


def _three_cycles(rank: int, folder: Path, sleep: bool) -> list[float]:
    device = on_device(folder, sleep=sleep)
    apart = []
    for version in range(3):
        apart.append(device.mismatch_nats())
        assert device.engine.version == version
        is_resident = [bool(device.engine.resident_bytes(part)) for part in MemoryTag]
        assert is_resident == ([False] * 3 if sleep else [True, True, False])  # it has no graphs
        device.train()
    return apart


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("sleep", [True, False])
def test_what_is_sampled_has_the_log_probs_that_the_trainer_gives_it_in_each_of_three_cycles(
    tmp_path: Path, sleep: bool, num_ranks: int
) -> None:
    folder = make_tiny_model(tmp_path)
    for apart in run_ranks(num_ranks, _three_cycles, folder, sleep):
        assert max(apart) < 1e-4


def _one_rank_fails_in_the_second_cycle(rank: int, folder: Path) -> tuple[str, float]:
    device = on_device(folder, sleep=True)
    assert device.mismatch_nats() < 1e-4
    device.train()
    if rank == 1:
        device.engine.shutdown()  # as if its memory had been taken away: nothing can resume
        device.engine.resume(MemoryTag.WEIGHTS)
    with pytest.raises(StageError) as raised:
        device.mismatch_nats()
    assert all(device.trainer.resident_bytes(part) for part in (TrainState.PARAMETERS,))
    device.train()
    return str(raised.value), device.mismatch_nats()


def test_a_real_engine_that_fails_on_one_rank_is_restarted_and_both_go_on(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    for text, apart in run_ranks(2, _one_rank_fails_in_the_second_cycle, folder):
        assert text.startswith("resume_weights failed on engine 1: PhaseError: ")
        assert apart < 1e-4


def test_the_embedded_engine_starts_with_its_memory_given_back(tmp_path: Path) -> None:
    device = on_device(make_tiny_model(tmp_path), sleep=True)
    assert not any(device.engine.resident_bytes(part) for part in MemoryTag)
    with pytest.raises(Exception, match="paused"):
        device.engine.generate(PROMPTS, SAMPLING)
    assert torch.isfinite(torch.tensor(device.mismatch_nats()))
