from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Max
from hybridrl.workers.rollout.buckets import Bucket, FlatBuffers, StagedBucket, tensors_in
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding import offloadable_models
from hybridrl.workers.sharding.control import ControlGroup, StageError
from hybridrl.workers.sharding.memory import DeviceMemory, await_release
from hybridrl.workers.sharding.offloadable_models import OffloadableModels
from hybridrl.workers.train.protocol import TrainState
from tests.workers.sharding.recording import (
    CPU,
    CountedMemory,
    Journal,
    RecordingEngine,
    RecordingTenant,
    allocate_on_host,
    recording_device,
)


def test_a_cpu_counts_storage_and_not_free_memory() -> None:
    assert DeviceMemory(CPU).free_bytes() is None
    DeviceMemory(CPU).empty_cache()


@pytest.mark.shows("2.15")
@pytest.mark.gpu
def test_a_release_counts_only_when_the_device_is_free_again() -> None:
    device = torch.device("cuda:0")
    memory = DeviceMemory(device)
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    before = DeviceMemory(device).free_bytes()

    def release(timeout_s: float) -> int:
        return await_release(
            MemoryTag.KV_CACHE,
            256 * 2**20,
            resident_bytes=int,
            memory=memory,
            free_before=before,
            timeout_s=timeout_s,
        )

    with pytest.raises(EngineError, match="the device lacks"):
        release(0.1)
    del block
    memory.empty_cache()
    assert release(5.0) >= 256 * 2**20
    assert memory.allocated_bytes() is not None


def test_shared_memory_is_collected_before_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    DeviceMemory(torch.device("cuda", 0)).empty_cache()
    assert calls == ["synchronize", "ipc_collect", "empty_cache"]


def test_what_tenants_do_not_list_keeps_them_from_having_left() -> None:
    tenant = RecordingTenant(Journal())
    tenants = OffloadableModels(device=CPU, control=ControlGroup(timeout_s=1.0))
    tenants.register("actor", tenant)
    engine_bytes = 3 * 2**30
    memory = CountedMemory(
        total=2**36,
        held_bytes=lambda: engine_bytes + sum(tenant.resident_bytes(part) for part in TrainState),
    )
    tenants.memory = memory
    tenants.engine_bytes = lambda: engine_bytes
    for unlisted, is_refused in ((2**28, False), (2**31, True), (0, False)):
        memory.unlisted = unlisted
        tenants.offload_optimizer()
        if is_refused:
            with pytest.raises(StageError, match=r"actor list nothing, and torch has 2,048.0 MiB"):
                tenants.offload_parameters()
        else:
            tenants.offload_parameters()
        assert memory.calls == ["empty_cache"] * 2
        memory.calls.clear()
        assert tenants.take_metrics() == {"memory/left_allocated_bytes/max": Max(unlisted)}
        assert tenants.take_metrics() == {}
        tenants.onload_training()


def test_two_tenants_may_not_have_one_name() -> None:
    tenants = OffloadableModels(device=CPU, control=ControlGroup(timeout_s=1.0))
    tenants.register("actor", RecordingTenant(Journal()))
    with pytest.raises(PhaseError, match="'actor' is registered already"):
        tenants.register("actor", RecordingTenant(Journal()))


class HandedEngine(RecordingEngine):
    """Gets buckets by handles; as torch does, it keeps their memory until they were opened."""

    def __init__(self, index: int, journal: Journal) -> None:
        super().__init__(index, journal)
        self.buffers = FlatBuffers(count=2, allocate=allocate_on_host)
        self.kept_bytes = 0

    def stage(self, bucket: Bucket) -> StagedBucket:
        flat, spans = self.buffers.pack(bucket)

        def make_handle() -> str:
            self.kept_bytes += flat.untyped_storage().nbytes()
            return "a handle"

        return StagedBucket(spans=spans, flat=flat, make_handle=make_handle)

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        assert staged.flat is not None
        tensors = list(tensors_in(staged.flat, staged.spans).items())
        super().load(replace(staged, tensors=tensors), handles)
        self.kept_bytes -= staged.buffer_bytes

    def release_buffers(self) -> None:
        self.buffers.free()


def test_an_engine_comes_back_though_torch_keeps_what_it_did_not_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offloadable_models, "_MAY_STAY_BYTES", 0)
    device = recording_device(kind=HandedEngine)
    engine, trainer = device.engine, device.trainer
    assert isinstance(engine, HandedEngine)
    device.manager._colocated.memory = CountedMemory(
        total=2**36,
        held_bytes=lambda: (
            sum(engine.resident_bytes(part) for part in MemoryTag)
            + sum(trainer.resident_bytes(part) for part in TrainState)
            + engine.kept_bytes
        ),
    )
    assert device.serve()
    assert engine.kept_bytes == 0
    for _ in range(2):
        device.train()
        engine.journal.fail(0, "load")
        before = engine.kept_bytes
        with pytest.raises(StageError, match="sync failed on engine 0: InjectedFault: load"):
            device.serve()
        assert engine.kept_bytes > before
        assert device.serve()
