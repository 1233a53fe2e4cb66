"""Garbage after sleep, with real engines: reproduced without the ledger, refused by name with it.

The bug that the ledger is there for: weights memory is released without a copy, comes back with
whatever it holds, and the sync sends only a part (adapters, say). Nothing fails, and the engine
samples fluent text from a policy that nobody trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.colocated_engines import ColocatedEngines
from hybridrl.workers.sharding.control import ControlGroup, StageError
from hybridrl.workers.sharding.fused_engines import FusedEngines
from hybridrl.workers.sharding.ledger import WeightLedger
from hybridrl.workers.sharding.lifecycle import LifeCycle, SleepLevel
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet
from tests.tiny_models import make_tiny_model
from tests.workers.device import PROMPTS, SAMPLING, largest_mismatch_nats
from tests.workers.rollout.engines import (
    ready_engine,
    rollout_config,
)
from tests.workers.train.engines import ACTOR, CPU, MODEL, make_rows, update

LEFT_OUT = "model.layers.1."
"""The second cycle's sync sends nothing of the last layer, as if it were frozen."""


class RecycledMemoryEngine(HFRolloutEngine):
    """What a GPU may do: memory that comes back still holds what another model left in it."""

    strangers: dict[str, Tensor]

    def resume(self, part: MemoryTag) -> None:
        super().resume(part)
        if part is MemoryTag.WEIGHTS:
            self.update_weights([(name, self.strangers[name]) for name in self.strangers])


class ForgetfulTrainer(PolicyEngine):
    """A trainer that promises all weights and, once told so, sends only a part."""

    is_forgetful = False

    def full_weights(self, part: WeightSet = WeightSet.BASE) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().full_weights(part):
            if not (self.is_forgetful and name.startswith(LEFT_OUT)):
                yield name, tensor


class BlindLedger(WeightLedger):
    """The ledger switched off: it keeps nothing and refuses nothing. Only tests have this."""

    is_covered = False  # so that each sync sends what the trainer has

    def require_covered(self) -> None:
        pass


class BareLifeCycle:
    """Real engines around one life cycle, with or without a ledger that looks."""

    def __init__(
        self,
        engine: HFRolloutEngine,
        folder: Path,
        *,
        keeps_books: bool,
        backup_weights: Literal["ledger", "always"] = "ledger",
    ) -> None:
        self.engine = engine
        config = replace(rollout_config(), backup_weights=backup_weights)
        control = ControlGroup(timeout_s=10.0)
        self.managed = ManagedEngine.of(engine, config=config, device=CPU)
        if not keeps_books:
            self.managed.ledger = BlindLedger(engine.weight_memory())
        self.set = FusedEngines(self.managed, config=config, device=CPU, control=control)
        tenants = ColocatedEngines(device=CPU, control=control)
        self.life = LifeCycle(
            self.set,
            host=tenants,
            depth=SleepLevel.RELEASE_ALL,
            observe=lambda stage: nullcontext(),
        )
        self.life.start()
        backend = FSDP2Backend(
            folder, config=ACTOR, model_config=MODEL, num_total_steps=10, device=CPU
        )
        self.trainer = ForgetfulTrainer(backend)
        self.set.attach(self.trainer)
        tenants.register("actor", self.trainer)

    def mismatch_nats(self) -> float:
        """Sample, score with the trainer, and return the largest distance of log-probs."""
        self.life.wake()
        responses = self.engine.generate(PROMPTS, SAMPLING)
        self.life.sleep()
        rollouts = assemble_rollouts(PROMPTS, responses, policy_version=0)
        return largest_mismatch_nats(self.trainer, rollouts)

    def train_and_forget(self) -> None:
        update(self.trainer, make_rows(4))
        self.set.trained_version += 1
        self.trainer.is_forgetful = True


def _fresh_memory(folder: Path) -> HFRolloutEngine:
    return HFRolloutEngine(folder, config=rollout_config(), max_context_tokens=32, device=CPU)


def _recycled_memory(folder: Path) -> HFRolloutEngine:
    engine = RecycledMemoryEngine(
        folder, config=rollout_config(), max_context_tokens=32, device=CPU
    )
    stranger = make_tiny_model(folder / "stranger", seed=1)
    engine.strangers = load_file(stranger / "model.safetensors")
    return engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


def test_without_a_ledger_lost_weights_are_noticed_only_if_they_happen_to_be_nan(
    folder: Path,
) -> None:
    device = BareLifeCycle(_fresh_memory(folder), folder, keeps_books=False)
    assert device.mismatch_nats() < 1e-4
    device.train_and_forget()
    with pytest.raises(EngineError, match=r"logits .*not finite.*lost in a release"):
        device.mismatch_nats()


def test_without_a_ledger_recycled_memory_is_fluent_garbage_that_nothing_notices(
    folder: Path,
) -> None:
    device = BareLifeCycle(_recycled_memory(folder), folder, keeps_books=False)
    assert device.mismatch_nats() < 1e-4
    device.train_and_forget()
    for _ in range(2):
        apart = device.mismatch_nats()  # no error: every log-prob is finite
        assert 0.5 < apart < 100.0


@pytest.mark.parametrize("memory", [_fresh_memory, _recycled_memory])
def test_with_the_ledger_the_same_is_refused_and_the_lost_tensors_are_named(
    memory: object, folder: Path
) -> None:
    assert callable(memory)
    device = BareLifeCycle(memory(folder), folder, keeps_books=True)
    assert device.mismatch_nats() < 1e-4
    device.train_and_forget()
    lost = [spec.name for spec in device.trainer.weight_specs() if spec.name.startswith(LEFT_OUT)]
    for _ in range(2):
        with pytest.raises(StageError, match="sync failed on engine 0: LedgerError: ") as raised:
            device.mismatch_nats()
        assert f"{len(lost)} of " in str(raised.value)
        assert f"holds: {', '.join(lost[:4])} and {len(lost) - 4} more (" in str(raised.value)
        assert "or keep a host copy with rollout.backup_weights=ledger" in str(raised.value)
        assert device.life.may_train
    device.trainer.is_forgetful = False
    assert device.mismatch_nats() < 1e-4


# -- what the ledger costs and saves ------------------------------------------------------------


def _host_bytes(engine: HFRolloutEngine) -> int:
    """Measured: the copies that the sleeping engine really holds."""
    return sum(copy.nbytes for copy in engine._memory[MemoryTag.WEIGHTS]._backups.values())


def _bytes_of(engine: HFRolloutEngine, *, buffers: bool) -> int:
    return sum(tensor.num_bytes for tensor in engine.weight_memory() if tensor.is_buffer is buffers)


@pytest.mark.parametrize("backup_weights", ["ledger", "always"])
def test_full_fine_tuning_keeps_a_host_copy_of_buffers_alone_unless_told_to_keep_all(
    folder: Path, backup_weights: Literal["ledger", "always"]
) -> None:
    engine = _fresh_memory(folder)
    device = BareLifeCycle(engine, folder, keeps_books=True, backup_weights=backup_weights)
    buffers, weights = (_bytes_of(engine, buffers=is_buffer) for is_buffer in (True, False))
    assert buffers > 0
    expected = buffers + (weights if backup_weights == "always" else 0)
    device.managed.take_metrics()
    for _ in range(3):
        assert device.mismatch_nats() < 1e-4
        assert _host_bytes(engine) == expected
        metrics = device.managed.take_metrics()
        assert metrics["memory/weight_backup_bytes"].value == expected
        assert metrics["memory/weight_backup_saved_bytes"].value == buffers + weights - expected
        update(device.trainer, make_rows(4))
        device.set.trained_version += 1


def test_buffers_survive_each_of_three_sleeps_bit_by_bit(folder: Path) -> None:
    engine = _recycled_memory(folder)
    device = BareLifeCycle(engine, folder, keeps_books=True)
    buffers = {name: engine._tensors[name] for name in engine._buffer_names}
    assert buffers
    assert not any(tensor.untyped_storage().nbytes() for tensor in buffers.values())
    truth = {name: tensor.clone() for name, tensor in ready_engine(folder)._model.named_buffers()}
    for _ in range(3):
        device.life.wake()
        assert all(torch.equal(buffers[name], truth[name]) for name in buffers)
        device.life.sleep()
