"""The log-probs of what SGLang sampled are the trainer's, through whole cycles of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.manager import ShardingManager
from tests.sglang.engines import sglang_config
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of
from tests.workers.train.engines import CPU, build_fsdp2, make_rows, update

PROMPTS = make_prompts((4, 9, 40))
SAMPLING = replace(sampling_params(group=4, tokens=8), temperature=0.7)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sleep", [True, False])
def test_sampled_log_probs_are_the_trainers_in_each_of_three_cycles(
    engine: SGLangEngine, served_model: Path, sleep: bool
) -> None:
    config = sglang_config(sleep=sleep)
    control = ControlGroup(timeout_s=60.0)
    manager = ShardingManager(engine=engine, config=config, device=CPU, control=control)
    trainer = build_fsdp2(served_model)
    manager.attach_policy(trainer)
    sampled = []
    for version in range(3):
        with manager.rollout_phase() as serving:
            responses = serving.generate(PROMPTS, SAMPLING)
        rollouts = assemble_rollouts(PROMPTS, responses, policy_version=version)
        manager.require_training()
        scored = trainer.compute_logprobs(rollouts, temperature=SAMPLING.temperature)
        mask = rollouts.response_mask_BL.values()
        apart = scored.logprobs_BL.values() - rollouts.sampler_logprobs_BL.values()
        assert float(apart[mask].abs().max()) < 1e-4
        assert engine.version == version
        sampled.append(tokens_of(responses))
        update(trainer, make_rows(4, seed=version))
        manager.weights_changed(version=version + 1)
    assert sampled[0] != sampled[1]
    assert torch.isfinite(scored.logprobs_BL.values()[mask]).all()
