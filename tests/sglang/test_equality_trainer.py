"""The log-probs of what SGLang sampled are the trainer's, through whole cycles of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from tests.sglang.engines import sglang_config
from tests.workers.device import Device
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of
from tests.workers.train.engines import build_fsdp2

PROMPTS = make_prompts((4, 9, 40))
SAMPLING = replace(sampling_params(group=4, tokens=8), temperature=0.7)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.shows("3.7", "3.9", "5.3")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("sleep", [True, False])
def test_sampled_log_probs_are_the_trainers_in_each_of_three_cycles(
    engine: SGLangEngine, served_model: Path, sleep: bool
) -> None:
    device = Device(
        engine,
        build_fsdp2(served_model),
        config=sglang_config(sleep=sleep),
        prompts=PROMPTS,
        sampling=SAMPLING,
    )
    sampled = []
    for version in range(3):
        responses = device.sample()
        assert device.apart_nats(responses, temperature=SAMPLING.temperature) < 1e-4
        assert engine.version == version
        sampled.append(tokens_of(responses))
        device.train()
    assert sampled[0] != sampled[1]
