"""The policy's worker with a reference: who leaves the device, and whose weights are sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import Sum
from hybridrl.workers.actor_rollout import ActorRolloutWorker
from hybridrl.workers.rollout.embedded.tensor_memory import checksum
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.config.values import config_of
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import make_rows, update


def _build(config: ExperimentConfig, folder: Path) -> ActorRolloutWorker:
    worker = ActorRolloutWorker.__new__(ActorRolloutWorker, config, folder)
    worker.fused = {"actor": worker}
    worker.__init__(config, folder)  # type: ignore[misc]
    return worker


def _sums(engine: PolicyEngine) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in engine.full_weights()}


def _two_steps(rank: int, folder: Path, config: ExperimentConfig) -> None:
    worker = _build(config, folder)
    reference, actor = worker._reference, worker._actor
    assert isinstance(reference, PolicyEngine)
    frozen = _sums(reference)
    sent_bytes = sum(spec.num_bytes for spec in actor.weight_specs(WeightSet.BASE))
    for step in range(3):
        worker.sharding.take_metrics()
        with worker.sharding.rollout_phase() as engine:
            assert engine is not None
            assert not any(reference.resident_bytes(part) for part in TrainState)
            sampled = engine.checksums()  # type: ignore[attr-defined]
        assert reference.resident_bytes(TrainState.PARAMETERS) > 0
        assert worker.sharding.take_metrics()["memory/synced_bytes"] == Sum(sent_bytes)
        learned = _sums(actor)
        assert {name: sampled[name] for name in learned} == learned
        assert _sums(reference) == frozen
        assert (learned == frozen) == (step == 0)
        update(actor, make_rows(4, seed=step))
        worker.sharding.weights_changed(version=step + 1)
    worker.close()


def test_a_reference_leaves_the_device_in_each_phase_and_is_never_sent(tmp_path: Path) -> None:
    config = config_of(
        "algorithm.kl.placement=loss",
        "algorithm.kl.coefficient=0.1",
        "rollout.sleep=true",
        "rollout.max_response_tokens=6",
        "data.max_digits=4",
    )
    config = replace(config, rollout=replace(config.rollout, num_slots=4, stage_timeout_s=30.0))
    run_ranks(1, _two_steps, make_tiny_model(tmp_path / "model"), config)
