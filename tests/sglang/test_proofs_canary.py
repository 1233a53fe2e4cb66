"""The canary on the real server: silent while it is the policy, loud when its memory is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.errors import DriftError
from hybridrl.workers.canary import Canary
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.sharding.control import ControlGroup
from tests.sglang.engines import sglang_config
from tests.sglang.lora_device import PROMPTS, ForgetfulEngine, ServedDevice


class WatchedServedDevice(ServedDevice):
    """A device with a canary that looks at every version."""

    def __init__(self, engine: SGLangEngine, folder: Path, way: str) -> None:
        super().__init__(engine, folder, way)
        self.canary = Canary(
            config=sglang_config(canary_every_steps=1, canary_max_drift_nats=0.01),
            num_updates_per_step=1,
            model_folder=folder,
            sharding=self.manager,
            control=ControlGroup(timeout_s=60.0),
            trainer=self.trainer,
        )
        self.canary.take_prompts(PROMPTS)

    def watch(self) -> float | None:
        with self.manager.rollout_phase() as serving:
            answers = self.canary.ask(serving, version=self.version)
        metrics = self.canary.judge(answers, version=self.version)
        return metrics["policy/canary_drift_nats/max"].value if metrics else None


def test_no_drift_is_found_in_each_of_three_cycles(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    device = WatchedServedDevice(lora_engine, served_model, "resend")
    for _ in range(3):
        assert device.watch() < 1e-4
        assert device.watch() is None
        device.train()


def test_a_base_lost_in_sleep_is_found_at_the_next_new_weights(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    """The garbage of an adapter on memory that nobody refilled: only the canary can see it."""
    device = WatchedServedDevice(lora_engine, served_model, "resident")
    assert device.watch() < 1e-4
    device.train()
    lora_engine.scramble()
    with pytest.raises(DriftError, match="Cause: weights"):
        device.watch()
    assert device.watch() < 1e-4


def test_and_at_the_next_wake_with_the_same_weights(
    lora_engine: ForgetfulEngine, served_model: Path
) -> None:
    device = WatchedServedDevice(lora_engine, served_model, "resident")
    assert device.watch() < 1e-4
    assert device.watch() is None
    lora_engine.scramble()
    with pytest.raises(DriftError, match="otherwise than before with the same weights"):
        device.watch()
