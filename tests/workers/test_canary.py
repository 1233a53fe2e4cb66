"""The canary sees an engine that is not the trainer's policy any more, and says why it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.batch import PromptBatch
from hybridrl.errors import DriftError
from hybridrl.metrics import Metrics, check_declared
from hybridrl.workers.canary import Canary
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import Response, SamplingParams
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.device import Device
from tests.workers.rollout.engines import make_prompts, rollout_config
from tests.workers.train.engines import CPU, build_fsdp2

PROMPTS = make_prompts((4, 9, 12, 3, 7, 8))


class HalfReceiving(HFRolloutEngine):
    """Tears the first bucket that it gets."""

    is_torn = False

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        if not self.is_torn:
            self.is_torn = True
            staged = self.stage([(name, tensor * 1.3) for name, tensor in staged.tensors])
        super().load(staged, handles)


class Mumbling(HFRolloutEngine):
    """Answers with ids of a larger vocabulary."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> list[Response]:
        responses = super().generate(prompts, sampling)
        return [replace(it, token_ids=it.token_ids + 64) for it in responses]


class Warm(HFRolloutEngine):
    """Answers with log-probs of another temperature than it was asked for."""

    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> list[Response]:
        return super().generate(prompts, replace(sampling, temperature=2 * sampling.temperature))


class WatchedDevice(Device):
    """One rank as a worker has it, with a canary."""

    def __init__(
        self, folder: Path, kind: type[HFRolloutEngine] = HFRolloutEngine, **changes: object
    ) -> None:
        common: dict[str, object] = {"canary_every_steps": 2, "canary_max_drift_nats": 0.01}
        config = replace(rollout_config(), **(common | changes))  # type: ignore[arg-type]
        engine = kind(folder, config=config, max_context_tokens=32, device=CPU)
        super().__init__(engine, build_fsdp2(folder), config=config)
        self.canary = Canary(
            config=config,
            num_updates_per_step=1,
            model_folder=folder,
            sharding=self.manager,
            control=self.control,
            trainer=self.trainer,
        )

    def watch(self) -> Metrics:
        """One rollout phase as a worker has it."""
        self.canary.take_prompts(PROMPTS)
        with self.manager.rollout_phase():
            answers = self.canary.ask(self.engine, version=self.version)
        metrics = self.canary.judge(answers, version=self.version)
        check_declared(metrics)
        return metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("sleep", [True, False])
def test_engines_that_agree_are_scored_every_second_step_and_asked_after_every_wake(
    folder: Path, sleep: bool
) -> None:
    device = WatchedDevice(folder, sleep=sleep)
    is_scored = []
    for _ in range(5):
        metrics = device.watch()
        is_scored.append(bool(metrics))
        if metrics:
            assert 0 <= metrics["policy/canary_drift_nats/max"].value < 1e-4
        assert device.watch() == {}  # an evaluation with the same weights
        device.train()
    assert is_scored == [True, False, True, False, True]


def test_weights_that_came_torn_are_the_cause_because_sending_them_again_helps(
    folder: Path,
) -> None:
    device = WatchedDevice(folder, HalfReceiving)
    with pytest.raises(DriftError, match=r"version 0\).*allowed 0\.01\. Cause: weights"):
        device.watch()
    assert device.watch()["policy/canary_drift_nats/max"].value < 1e-4


def test_log_probs_of_another_distribution_are_named_as_such(folder: Path) -> None:
    with pytest.raises(DriftError, match="Cause: temperature or top-p"):
        WatchedDevice(folder, Warm).watch()


@pytest.mark.parametrize("truncation", [{"top_p": 0.4}, {"top_k": 3}])
def test_truncated_sampling_is_no_drift(folder: Path, truncation: dict[str, float]) -> None:
    drift = WatchedDevice(folder, temperature=0.7, **truncation).watch()
    assert drift["policy/canary_drift_nats/max"].value < 1e-4


def test_another_number_type_is_named_as_such(folder: Path) -> None:
    with pytest.raises(DriftError, match="Cause: kernels or number types"):
        WatchedDevice(folder, dtype="bfloat16", canary_max_drift_nats=1e-4).watch()


def test_ids_that_the_trainer_has_not_are_named_before_it_is_asked_for_them(folder: Path) -> None:
    with pytest.raises(DriftError, match="Cause: tokens"):
        WatchedDevice(folder, Mumbling).watch()


def test_garbage_after_a_wake_is_seen_although_no_new_weights_came(folder: Path) -> None:
    device = WatchedDevice(folder, sleep=False)
    for _ in range(2):
        device.watch()
        device.train()
    device.watch()
    with torch.no_grad():
        device.engine._tensors["model.norm.weight"].mul_(-0.5)
    with pytest.raises(DriftError, match=r"otherwise than before.*\(version 2\)"):
        device.watch()


def test_without_a_canary_nothing_is_asked(folder: Path) -> None:
    device = WatchedDevice(folder, Mumbling, canary_every_steps=0)
    assert device.watch() == {}
    assert device.engine.last_stats is None


def _watch_with_one_torn_engine(rank: int, folder: Path) -> str:
    kind = HalfReceiving if rank == 0 else HFRolloutEngine
    device = WatchedDevice(folder, kind)
    try:
        device.watch()
    except DriftError as error:
        return str(error)
    return ""


def test_all_ranks_stop_for_the_engine_of_one(folder: Path) -> None:
    one, other = run_ranks(2, _watch_with_one_torn_engine, folder)
    assert "Cause: weights" in one
    assert one.partition("After")[0] == other.partition("After")[0]
