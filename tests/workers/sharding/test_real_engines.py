"""The embedded rollout engine and the FSDP2 training engine on one device, in turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.batch import row_lengths
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import ControlGroup, StageError
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.train.protocol import TrainState
from tests.models import make_tiny_model
from tests.ranks import run_ranks
from tests.workers.rollout.engines import make_prompts, rollout_config, sampling_params
from tests.workers.train.engines import CPU, build_fsdp2, make_rows, update

PROMPTS = make_prompts((4, 9, 5))
SAMPLING = sampling_params(group=2, tokens=6)


class Device:
    """One rank as a worker has it, with both real engines."""

    def __init__(self, folder: Path, *, sleep: bool) -> None:
        config = replace(rollout_config(), sleep=sleep)
        self.engine = HFRolloutEngine(folder, config=config, max_context_tokens=32, device=CPU)
        self.manager = ShardingManager(
            engine=self.engine, config=config, device=CPU, control=ControlGroup(timeout_s=30.0)
        )
        self.trainer = build_fsdp2(folder)
        self.manager.attach_policy(self.trainer)
        self.version = 0

    def mismatch_nats(self) -> float:
        """Sample, score with the trainer, and return the largest distance of log-probs."""
        with self.manager.rollout_phase() as engine:
            assert engine is self.engine
            responses = engine.generate(PROMPTS, SAMPLING)
        rollouts = assemble_rollouts(PROMPTS, responses, policy_version=self.version)
        self.manager.require_training()
        scored = self.trainer.compute_logprobs(rollouts, temperature=SAMPLING.temperature)
        mask = rollouts.response_mask_BL.values()
        assert int(mask.sum()) >= len(row_lengths(rollouts.token_ids_BL))
        apart = scored.logprobs_BL.values() - rollouts.sampler_logprobs_BL.values()
        return float(apart[mask].abs().max())

    def train(self) -> None:
        update(self.trainer, make_rows(4, seed=self.version))
        self.version += 1
        self.manager.weights_changed(version=self.version)


def _three_cycles(rank: int, folder: Path, sleep: bool) -> list[float]:
    device = Device(folder, sleep=sleep)
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
    device = Device(folder, sleep=True)
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
    device = Device(make_tiny_model(tmp_path), sleep=True)
    assert not any(device.engine.resident_bytes(part) for part in MemoryTag)
    with pytest.raises(Exception, match="paused"):
        device.engine.generate(PROMPTS, SAMPLING)
    assert torch.isfinite(torch.tensor(device.mismatch_nats()))
