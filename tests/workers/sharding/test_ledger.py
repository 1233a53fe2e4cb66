from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.errors import LedgerError
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.protocol import MemoryTag, WeightMemory
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.managed_engine import WeightLedger
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet
from tests.drawn import cases
from tests.tiny_models import make_tiny_model
from tests.workers.device import Device
from tests.workers.rollout.engines import rollout_config
from tests.workers.sharding.recording import BUFFER, WEIGHTS
from tests.workers.train.engines import ACTOR, CPU, MODEL

ALL = [*WEIGHTS, BUFFER]


def _ledger() -> WeightLedger:
    sizes = WEIGHTS | {BUFFER: 3}
    return WeightLedger([WeightMemory(name, 4 * n, name == BUFFER) for name, n in sizes.items()])


def _sync(ledger: WeightLedger, names: list[str]) -> None:
    ledger.begin_sync(names)
    ledger.receive(names)


def test_what_is_not_the_trainers_is_refused_by_name_and_reason() -> None:
    ledger = _ledger()
    with pytest.raises(LedgerError, match="never sent since the engine started"):
        ledger.require_covered()
    _sync(ledger, list(WEIGHTS))
    ledger.require_covered()
    for _ in range(2):
        ledger.begin_sync(WEIGHTS)
        ledger.receive(["embed.weight", "layer.weight"])
        with pytest.raises(LedgerError, match=r"norm.weight, head.weight \(the last sync broke"):
            ledger.require_covered()
        _sync(ledger, list(WEIGHTS))
        ledger.require_covered()
    for _ in range(2):
        ledger.release(backup=())
        _sync(ledger, list(WEIGHTS))
        with pytest.raises(LedgerError) as raised:
            ledger.require_covered()
        assert str(raised.value) == (
            "1 of 5 rollout tensors are not what the trainer holds: rotary.inv_freq (lost when the "
            "engine released its weights). Send them with the sync, or keep a host copy with "
            "rollout.backup_weights=ledger"
        )
    with pytest.raises(LedgerError, match=r"1 tensors that .* not have: lm_head.*model\.path"):
        _sync(ledger, ["embed.weight", "lm_head.weight"])


@pytest.mark.shows("1.2", "5.1")
@given(sent=st.sets(st.sampled_from(list(WEIGHTS))), is_first=st.booleans())
def test_a_host_copy_is_kept_of_exactly_what_no_sync_sends(sent: set[str], is_first: bool) -> None:
    ledger = _ledger()
    if not is_first:
        _sync(ledger, list(WEIGHTS))
    good = {BUFFER} if is_first else set(ALL)
    backup = ledger.backup_for(sent)
    assert backup == good - sent
    ledger.release(backup)
    _sync(ledger, sorted(sent))
    assert ledger.is_covered == (not is_first or sent == set(WEIGHTS))


@pytest.mark.shows("R9.4")
@cases(by_day=40, by_night=300)
@given(data=st.data())
def test_covered_means_that_every_tensor_is_what_it_should_be(data: st.DataObject) -> None:
    ledger = _ledger()
    good = {BUFFER}
    names = st.sets(st.sampled_from(ALL))
    for move in data.draw(st.lists(st.sampled_from(["boot", "release", "sync", "torn"]))):
        if move == "boot":
            ledger.boot()
            good = {BUFFER}
        elif move == "release":
            backup = data.draw(names)
            ledger.release(backup)
            good &= backup
        else:
            sent = data.draw(names)
            arrived = sent if move == "sync" else sent & data.draw(names)
            ledger.begin_sync(sent)
            ledger.receive(arrived)
            good = (good - sent) | arrived
        assert ledger.is_covered == (good == set(ALL))
        assert ledger.backup_for(()) == good


# Garbage after sleep, with real engines: weights memory is released without a copy, comes back with
# whatever it holds, and the sync sends only a part (adapters, say). Nothing fails, and the engine
# samples fluent text from a policy that nobody trains.

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


def _device(
    folder: Path,
    *,
    is_recycled: bool = False,
    backup_weights: Literal["ledger", "always"] = "ledger",
) -> Device:
    config = replace(rollout_config(), backup_weights=backup_weights)
    kind = RecycledMemoryEngine if is_recycled else HFRolloutEngine
    engine = kind(folder, config=config, max_context_tokens=32, device=CPU)
    if isinstance(engine, RecycledMemoryEngine):
        stranger = make_tiny_model(folder / "stranger", seed=1)
        engine.strangers = load_file(stranger / "model.safetensors")
    backend = FSDP2Backend(folder, config=ACTOR, model_config=MODEL, num_total_steps=10, device=CPU)
    return Device(engine, ForgetfulTrainer(backend), config=config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


@pytest.mark.shows("1.2", "R9.4")
@pytest.mark.parametrize("is_recycled", [False, True])
def test_with_the_ledger_the_lost_tensors_are_refused_by_name(
    is_recycled: bool, folder: Path
) -> None:
    device = _device(folder, is_recycled=is_recycled)
    assert device.mismatch_nats() < 1e-4
    device.train()
    device.trainer.is_forgetful = True
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


@pytest.mark.shows("1.3")
@pytest.mark.parametrize("backup_weights", ["ledger", "always"])
def test_full_fine_tuning_copies_buffers_alone_unless_asked(
    folder: Path, backup_weights: Literal["ledger", "always"]
) -> None:
    device = _device(folder, backup_weights=backup_weights)
    engine = device.engine
    buffers, weights = (
        sum(memory.num_bytes for memory in engine.weight_memory() if memory.is_buffer is is_buffer)
        for is_buffer in (True, False)
    )
    assert buffers > 0
    expected = buffers + (weights if backup_weights == "always" else 0)
    device.manager.take_metrics()
    for _ in range(3):
        assert device.mismatch_nats() < 1e-4
        copies = engine._memory[MemoryTag.WEIGHTS]._backups.values()
        assert sum(copy.nbytes for copy in copies) == expected
        metrics = device.manager.take_metrics()
        assert metrics["memory/weight_backup_bytes"].value == expected
        assert metrics["memory/weight_backup_saved_bytes"].value == buffers + weights - expected
        device.train()
