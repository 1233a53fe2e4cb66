"""On the real server: what it samples is learned from while it is the policy, and not after."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.batch import LogprobBatch
from hybridrl.errors import DriftError
from hybridrl.trainer.train_batch import build_train_batch
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from tests.sglang.lora_device import SAMPLING, ForgetfulEngine, ServedDevice


def _learn(device: ServedDevice) -> None:
    rollouts = device.rollouts()
    none = LogprobBatch(batch_size=[len(rollouts)])
    batch = build_train_batch(rollouts, none, rollouts.sampler_logprobs_BL)
    device.trainer.update(
        batch,
        loss=PolicyGradientLoss(policy_loss=Part.of(ppo_clip), max_drift_nats=0.01),
        aggregation=TOKEN_MEAN,
        temperature=SAMPLING.temperature,
        max_response_tokens=8,
    )
    device.version += 1
    device.manager.weights_changed(version=device.version)


@pytest.mark.shows("1.18")
def test_a_base_that_did_not_survive_a_sleep_is_not_learned_from(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    """The garbage of an adapter on memory that nobody refilled."""
    device = ServedDevice(lora_engine, served_model, "resident")
    _learn(device)
    _learn(device)
    lora_engine.scramble()
    with pytest.raises(DriftError, match="are not the same policy"):
        _learn(device)
