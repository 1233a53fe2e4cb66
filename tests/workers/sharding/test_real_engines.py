from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridrl.config.model import ATTENTION_LINEAR, LoraConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import EngineError, PhaseError
from hybridrl.workers.rollout.buckets import stage_by_reference
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.embedded.tensor_memory import checksum
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.ranks import run_ranks
from tests.tiny_models import SPARSE, Family, make_tiny_model
from tests.workers.device import WAYS, Device, Journalling, LoraDevice, check_passes
from tests.workers.rollout.engines import rollout_config, unsynced_engine
from tests.workers.train.engines import CPU, build_fsdp2
from tests.workers.train.lora_engines import LORA, with_lora


class JournallingHF(Journalling, HFRolloutEngine):
    def __init__(self, *args: object, **kwargs: object) -> None:
        self.forget_journal()
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]


def on_device(folder: Path, way: str = "resident", *, lora: LoraConfig = LORA) -> LoraDevice:
    def make_engine(config: RolloutConfig, sent: LoraConfig | None) -> JournallingHF:
        return JournallingHF(folder, config=config, max_context_tokens=32, device=CPU, lora=sent)

    return LoraDevice(make_engine, folder, way, config=rollout_config(), lora=lora)


def without_lora(folder: Path, way: str) -> Device:
    config = replace(rollout_config(), sleep=way != "awake")
    return Device(unsynced_engine(folder, config=config), build_fsdp2(folder), config=config)


def require_bits(device: Device, buffers: dict[str, int]) -> None:
    with device.manager.rollout_phase() as engine:
        assert isinstance(engine, HFRolloutEngine)
        ours = engine.checksums()
    assert ours.items() >= buffers.items()
    for part in device.trainer.weight_sets:
        for name, tensor in device.trainer.full_weights(part):
            assert ours[name] == checksum(tensor), name


def _three_cycles(rank: int, folder: Path, way: str, sync: str) -> list[float]:
    """Return how far the samples of three versions are from the trainer's log-probs."""
    if sync == "all weights":
        device = without_lora(folder, way)
    else:
        device = on_device(folder, way, lora=with_lora(sync=sync))
    if way in ("backup", "resend"):
        assert not any(device.engine.resident_bytes(part) for part in MemoryTag)
    sent = {
        spec.name
        for part in device.trainer.weight_sets
        for spec in device.trainer.weight_specs(part)
    }
    sums = unsynced_engine(folder).checksums()
    buffers = {name: checksum for name, checksum in sums.items() if name not in sent}
    apart = []
    for version in range(3):
        apart.append(device.mismatch_nats())
        assert device.engine.version == version
        require_bits(device, buffers)
        device.train()
    return apart


@pytest.mark.shows("1.1", "1.6", "1.8", "1.17", "3.7", "4.24", "R9.5")
@pytest.mark.parametrize(
    ("way", "sync"),
    [
        *((way, "adapter") for way in WAYS),
        *(("awake", sync) for sync in ("merged", "all weights")),
        *(("backup", sync) for sync in ("merged", "all weights")),
    ],
)
def test_tensors_have_the_trainers_bits_and_samples_its_log_probs_in_each_cycle(
    tiny_model: Path, way: str, sync: str
) -> None:
    assert max(_three_cycles(0, tiny_model, way, sync)) < 1e-4


def test_so_it_is_on_two_ranks(tiny_model: Path) -> None:
    for apart in run_ranks(2, _three_cycles, tiny_model, "backup", "merged"):
        assert max(apart) < 1e-4


BY_DAY = ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text")
"""Matrices of experts apart in files, in one tensor with biases, and beside layers with a state."""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.nightly] * (f not in BY_DAY)) for f in SPARSE]
)
def test_experts_are_sent_and_sample_as_they_score(family: Family, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family)
    assert max(_three_cycles(0, folder, "backup", "all weights")) < 1e-4


def _two_kinds_of_cycles(rank: int, folder: Path) -> list[float]:
    """Sync all weights, and then adapters of the attention alone."""
    attention = with_lora(target_modules=ATTENTION_LINEAR)
    device = on_device(folder, "resident", lora=attention)
    apart = _three_cycles(rank, folder, "awake", "all weights")
    for _ in range(2):
        device.train()
        apart.append(device.mismatch_nats())
    return apart


def test_experts_sharded_over_two_ranks_do_so_too(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "mixtral", num_local_experts=3)
    for apart in run_ranks(2, _two_kinds_of_cycles, folder):
        assert max(apart) < 1e-4


@pytest.mark.shows("1.4", "1.7", "1.8", "1.10", "R9.5")
@pytest.mark.parametrize("way", WAYS)
def test_the_base_goes_before_the_first_adapter_and_again_only_where_it_was_lost(
    tiny_model: Path, way: str
) -> None:
    device = on_device(tiny_model, way)
    check_passes(device, way)
    device.sample()  # of an unchanged policy
    adapter = device.bytes_of(WeightSet.ADAPTER)
    lost = {"backup": adapter, "resend": adapter + device.bytes_of(WeightSet.BASE)}
    assert device.take_bytes("synced_bytes") == lost.get(way, 0)


@pytest.mark.shows("1.7", "R9.5")
@pytest.mark.parametrize("way", WAYS)
def test_a_restarted_engine_gets_base_and_adapter_before_it_serves(
    tiny_model: Path, way: str
) -> None:
    device = on_device(tiny_model, way)
    device.sample()
    device.train()
    device.engine.shutdown()  # as if its memory had been taken away
    if way in ("backup", "resend"):
        device.engine.resume(MemoryTag.WEIGHTS)  # so that the life cycle cannot
    with pytest.raises((StageError, PhaseError)):
        device.sample()
    device.engine.received.clear()
    assert device.mismatch_nats() < 1e-4
    names = {m.name for m in device.engine.weight_memory() if not m.is_buffer}
    assert set(device.engine.received) == names


def _without(trainer: object, keep: tuple[str, ...]) -> None:
    """Make the adapter part of a trainer's stream yield only names with a word of ``keep``."""
    whole = trainer.full_weights  # type: ignore[attr-defined]

    def part(
        part: WeightSet = WeightSet.BASE, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole(part, dtype=dtype):
            if part is WeightSet.BASE or any(word in name for word in keep):
                yield name, tensor

    trainer.full_weights = part  # type: ignore[attr-defined]


@pytest.mark.shows("1.9")
@pytest.mark.parametrize("keep", [(), ("layers.0.",)])
def test_an_adapter_sync_with_too_few_tensors_is_refused(
    tiny_model: Path, keep: tuple[str, ...]
) -> None:
    device = on_device(tiny_model, "backup")
    whole = device.trainer.full_weights
    _without(device.trainer, keep)
    for _ in range(2):
        with pytest.raises(StageError, match="the adapter lacks"):
            device.sample()
        device.trainer.resident_bytes(TrainState.PARAMETERS)
    device.trainer.full_weights = whole
    assert device.mismatch_nats() < 1e-4


@pytest.mark.shows("1.10", "1.13", "1.14")
def test_an_adapter_is_kept_in_memory_of_its_own_until_its_sync_ends(tiny_model: Path) -> None:
    """In-region or host tensors cannot be opened by another process; views drag a storage along."""
    device = on_device(tiny_model, "awake")
    device.sample()
    managed = ManagedEngine(device.engine, config=rollout_config(), device=CPU)
    region = torch.randn(10_000)
    name = next(m.name for m in device.engine.weight_memory() if "lora_A" in m.name)
    view = region[:8].view(2, 4)
    managed.keep_adapter(stage_by_reference([(name, view)]), [])
    kept = managed._adapter[name]
    assert kept.untyped_storage().nbytes() == view.nbytes
    region.zero_()
    assert kept.any()
    managed.begin_part(["y.lora_A.weight"])  # of the next sync: that one was torn
    with pytest.raises(EngineError, match="the adapter lacks"):
        managed.load_adapter(version=1)
