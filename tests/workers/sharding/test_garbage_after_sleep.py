"""Garbage after sleep, with real engines: what is lost is refused by name.

The bug that the ledger is there for: weights memory is released without a copy, comes back with
whatever it holds, and the sync sends only a part (adapters, say). Nothing fails, and the engine
samples fluent text from a policy that nobody trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.config.rollout import RolloutConfig
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet
from tests.tiny_models import make_tiny_model
from tests.workers.device import Device
from tests.workers.rollout.engines import ready_engine, rollout_config
from tests.workers.train.engines import ACTOR, CPU, MODEL

LEFT_OUT = "model.layers.1."
"""The second cycle's sync sends nothing of the last layer, as if it were frozen."""


class RecycledMemoryEngine(HFRolloutEngine):
    """What a GPU may do: memory that comes back still holds what another model left in it."""

    strangers: dict[str, Tensor]

    def resume(self, part: MemoryTag) -> None:
        super().resume(part)
        if part is MemoryTag.WEIGHTS:
            self.load(self.stage(list(self.strangers.items())), [])


class ForgetfulTrainer(PolicyEngine):
    """A trainer that promises all weights and, once told so, sends only a part."""

    is_forgetful = False

    def full_weights(
        self, part: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().full_weights(part, dtype=dtype):
            if not (self.is_forgetful and name.startswith(LEFT_OUT)):
                yield name, tensor


def _fresh_memory(folder: Path, config: RolloutConfig) -> HFRolloutEngine:
    return HFRolloutEngine(folder, config=config, max_context_tokens=32, device=CPU)


def _recycled_memory(folder: Path, config: RolloutConfig) -> HFRolloutEngine:
    engine = RecycledMemoryEngine(folder, config=config, max_context_tokens=32, device=CPU)
    stranger = make_tiny_model(folder / "stranger", seed=1)
    engine.strangers = load_file(stranger / "model.safetensors")
    return engine


def _device(
    folder: Path,
    memory: Callable[[Path, RolloutConfig], HFRolloutEngine],
    *,
    backup_weights: Literal["ledger", "always"] = "ledger",
) -> Device:
    """Both real engines."""
    config = replace(rollout_config(), backup_weights=backup_weights)
    backend = FSDP2Backend(folder, config=ACTOR, model_config=MODEL, num_total_steps=10, device=CPU)
    return Device(memory(folder, config), ForgetfulTrainer(backend), config=config)


def _train_and_forget(device: Device) -> None:
    device.train()
    device.trainer.is_forgetful = True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


@pytest.mark.shows("1.2", "R9.4")
@pytest.mark.parametrize("memory", [_fresh_memory, _recycled_memory])
def test_with_the_ledger_the_lost_tensors_are_refused_by_name(
    memory: Callable[[Path, RolloutConfig], HFRolloutEngine], folder: Path
) -> None:
    device = _device(folder, memory)
    assert device.mismatch_nats() < 1e-4
    _train_and_forget(device)
    lost = [spec.name for spec in device.trainer.weight_specs() if spec.name.startswith(LEFT_OUT)]
    for _ in range(2):
        with pytest.raises(StageError, match="sync failed on engine 0: LedgerError: ") as raised:
            device.mismatch_nats()
        assert f"{len(lost)} of " in str(raised.value)
        assert f"holds: {', '.join(lost[:4])} and {len(lost) - 4} more (" in str(raised.value)
        assert "or keep a host copy with rollout.backup_weights=ledger" in str(raised.value)
        device.manager.require_training()
    device.trainer.is_forgetful = False
    assert device.mismatch_nats() < 1e-4


# -- what the ledger costs and saves ------------------------------------------------------------


def _host_bytes(engine: HFRolloutEngine) -> int:
    """Measured: the copies that the sleeping engine really holds."""
    return sum(copy.nbytes for copy in engine._memory[MemoryTag.WEIGHTS]._backups.values())


def _bytes_of(engine: HFRolloutEngine, *, buffers: bool) -> int:
    return sum(tensor.num_bytes for tensor in engine.weight_memory() if tensor.is_buffer is buffers)


@pytest.mark.shows("1.3")
@pytest.mark.parametrize("backup_weights", ["ledger", "always"])
def test_full_fine_tuning_copies_buffers_alone_unless_asked(
    folder: Path, backup_weights: Literal["ledger", "always"]
) -> None:
    device = _device(folder, _fresh_memory, backup_weights=backup_weights)
    engine = device.engine
    buffers, weights = (_bytes_of(engine, buffers=is_buffer) for is_buffer in (True, False))
    assert buffers > 0
    expected = buffers + (weights if backup_weights == "always" else 0)
    device.manager.take_metrics()
    for _ in range(3):
        assert device.mismatch_nats() < 1e-4
        assert _host_bytes(engine) == expected
        metrics = device.manager.take_metrics()
        assert metrics["memory/weight_backup_bytes"].value == expected
        assert metrics["memory/weight_backup_saved_bytes"].value == buffers + weights - expected
        device.train()


@pytest.mark.shows("1.17")
def test_buffers_survive_each_of_three_sleeps_bitwise(folder: Path) -> None:
    device = _device(folder, _recycled_memory)
    engine = device.engine
    buffers = {name: engine._tensors[name] for name in engine._buffer_names}
    assert buffers
    assert not any(tensor.untyped_storage().nbytes() for tensor in buffers.values())
    truth = {name: tensor.clone() for name, tensor in ready_engine(folder)._model.named_buffers()}
    for _ in range(3):
        with device.manager.rollout_phase():
            assert all(torch.equal(buffers[name], truth[name]) for name in buffers)
