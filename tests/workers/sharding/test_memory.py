from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Max, Metrics, Sum, check_declared
from hybridrl.workers.rollout.buckets import Bucket, FlatBuffers, StagedBucket, tensors_in
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding import memory as memory_module
from hybridrl.workers.sharding import offloadable_models
from hybridrl.workers.sharding.control import ControlGroup, StageError
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.memory import (
    DeviceMemory,
    Holder,
    await_release,
    demanded_bytes,
    memory_table,
    ordinary_segments,
)
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.sharding.offloadable_models import OffloadableModels
from hybridrl.workers.train.protocol import TrainState
from tests.workers.rollout.engines import allocate_on_host
from tests.workers.sharding.recording import (
    CPU,
    CountedMemory,
    Journal,
    RecordingEngine,
    RecordingTenant,
    managed_engine,
    recording_device,
)


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
    with pytest.raises(PhaseError, match="'actor' is registered already"):
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


class CrampedEngine(RecordingEngine):
    num_tries = 0

    def resume(self, part: MemoryTag) -> None:
        if part is MemoryTag.KV_CACHE:
            self.num_tries += 1
            raise EngineError("cuMemCreate: out of memory")
        super().resume(part)


def test_the_largest_holder_of_each_section_comes_first() -> None:
    engine = [Holder("engine kv_cache", 0), Holder("engine weights", 15 * 2**30)]
    tenants = [Holder("actor parameters", 2**20), Holder("critic optimizer", 3 * 2**20)]
    assert memory_table("memory of cuda:0", engine, tenants, [Holder("device free", 2**19)]) == (
        "memory of cuda:0:\n"
        "  engine weights       15,360.0 MiB\n"
        "  critic optimizer          3.0 MiB\n"
        "  actor parameters          1.0 MiB\n"
        "  device free               0.5 MiB"
    )
    assert memory_table("memory of cpu", []) == "memory of cpu: nobody here holds any"
    on_cpu = DeviceMemory(CPU)  # storage is counted there, and not free memory
    on_cpu.empty_cache()
    assert (on_cpu.figures(), on_cpu.free_bytes()) == ([], None)


@pytest.mark.shows("3.13")
def test_a_resume_without_room_names_who_holds_the_memory() -> None:
    device = recording_device(kind=CrampedEngine)
    engine, manager = device.engine, device.manager
    assert isinstance(engine, CrampedEngine)
    for num_phases in (1, 2):
        match = "could not resume its kv_cache"
        with pytest.raises(StageError, match=match) as raised, manager.rollout_phase():
            raise AssertionError("nobody may sample")
        assert "cuMemCreate: out of memory" in str(raised.value)
        assert "engine weights" in str(raised.value)
        assert engine.num_tries == num_phases
        manager.require_training()


TOTAL = 1000


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of these tests hold bytes, not gibibytes."""
    monkeypatch.setattr(memory_module, "_KERNELS_BYTES", 0)


class Overstating(RecordingEngine):
    says: dict[MemoryTag, float]

    def resident_bytes(self, part: MemoryTag) -> int:
        return int(self.held_bytes(part) * self.says.get(part, 1.0))

    def held_bytes(self, part: MemoryTag) -> int:
        return super().resident_bytes(part)


def _managed(
    says: dict[MemoryTag, float] | None = None, *, engine: str = "sglang", late: int = 0
) -> tuple[ManagedEngine, Overstating, CountedMemory]:
    recording = Overstating(0, Journal())
    recording.says = says or {}
    managed = managed_engine(recording, stage_timeout_s=1.0, engine=engine)
    memory = CountedMemory(total=TOTAL, held_bytes=_held(recording, late))
    managed.memory = memory
    return managed, recording, memory


def _held(engine: Overstating, num_late_looks: int) -> Callable[[], int]:
    """What the driver says: memory is free only after it was looked at a few times."""
    before = 0
    looks = 0

    def held() -> int:
        nonlocal before, looks
        now = sum(engine.held_bytes(part) for part in MemoryTag)
        looks = looks + 1 if now < before else 0
        if now < before and looks <= num_late_looks:
            return before
        before = now
        return now

    return held


@pytest.mark.shows("2.15")
def test_of_graphs_nothing_is_demanded_and_what_was_seen_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    managed, engine, memory = _managed({MemoryTag.CUDA_GRAPH: 50.0})
    held = {part: engine.held_bytes(part) for part in MemoryTag}
    with caplog.at_level(logging.INFO):
        managed.release_all()
    metrics = managed.take_metrics()
    check_declared(metrics)
    assert metrics["memory/released_bytes"] == Sum(sum(held.values()))
    assert metrics["memory/unseen_release_bytes"] == Sum(49 * held[MemoryTag.CUDA_GRAPH])
    levels = {
        record.args[0]: record.levelname
        for record in caplog.records
        if isinstance(record.args, tuple) and record.args
    }
    assert levels == {"kv_cache": "INFO", "cuda_graph": "INFO", "weights": "INFO"}
    memory.unlisted = TOTAL - sum(held.values())
    for _ in range(2):  # there is room for what was given back, not for what was said
        managed.resume_weights()
        managed.resume_cache()


@pytest.mark.shows("2.15")
@pytest.mark.parametrize("part", [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
def test_most_of_weights_and_cache_must_be_seen_to_be_freed(
    part: MemoryTag, caplog: pytest.LogCaptureFixture
) -> None:
    managed, _, _ = _managed({part: 1.2})  # 0.83 come back
    with caplog.at_level(logging.WARNING):
        managed.release_all()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"released: part={part.value} said_mib=")
    managed, _, _ = _managed({part: 1.4})  # 0.71 come back
    with pytest.raises(EngineError, match=r"did not come back within 1 s: the engine still h"):
        managed.release_all()


@pytest.mark.shows("2.15")
def test_memory_that_is_free_a_while_after_the_answer_counts() -> None:
    managed, engine, memory = _managed(late=3)
    held = sum(engine.held_bytes(part) for part in MemoryTag)
    assert memory.free_bytes() == TOTAL - held
    managed.release_all()
    assert managed.take_metrics()["memory/released_bytes"] == Sum(held)
    assert memory.free_bytes() == TOTAL


@pytest.mark.parametrize(
    ("engine", "part", "remedy"),
    [
        ("sglang", MemoryTag.KV_CACHE, "lower rollout.memory_fraction"),
        ("sglang", MemoryTag.WEIGHTS, "raise rollout.tensor_parallel_size, or train on more ranks"),
        ("hf", MemoryTag.KV_CACHE, "lower rollout.num_slots"),
        ("hf", MemoryTag.WEIGHTS, "train on more ranks, or set rollout.dtype=bfloat16"),
    ],
)
def test_a_resume_without_room_is_refused_with_a_remedy(
    engine: str, part: MemoryTag, remedy: str
) -> None:
    managed, recording, memory = _managed(engine=engine)
    managed.neighbours = lambda: [Holder("actor parameters", 7 * 2**20)]
    needed = recording.held_bytes(part)
    managed.release_all()
    if part is MemoryTag.KV_CACHE:
        managed.resume_weights()
    recording.journal.events.clear()
    memory.unlisted = memory.free_bytes() - needed + 133  # so many bytes too few
    with pytest.raises(EngineError) as raised:
        if part is MemoryTag.KV_CACHE:
            managed.resume_cache()
        else:
            managed.resume_weights()
    text = str(raised.value)
    assert text.startswith(f"the rollout engine's {part.value} needs 0.0 MiB and ")
    assert remedy in text
    assert "actor parameters" in text
    assert recording.journal.calls() == []  # the server was never asked
    memory.unlisted = 0
    managed.resume_weights()
    managed.resume_cache()
    assert memory.free_bytes() < TOTAL


def test_kernels_that_stay_are_not_demanded_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    small, large = 28 * 2**20, 20 * 2**30
    assert demanded_bytes(MemoryTag.WEIGHTS, small) == 0
    assert demanded_bytes(MemoryTag.WEIGHTS, large) > 0.7 * large
    assert demanded_bytes(MemoryTag.KV_CACHE, small) > 0.7 * small


ON = "expandable_segments:True,max_split_size_mb:128"
OFF = "expandable_segments:False,max_split_size_mb:128"


def settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def _settings_of_this_process() -> Iterator[None]:
    before = settings()
    yield
    torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


@pytest.mark.shows("3.12")
@pytest.mark.parametrize("before", [ON, OFF])
def test_segments_are_off_within_and_settings_come_back(before: str) -> None:
    torch._C._accelerator_setAllocatorSettings(before)
    for _ in range(2):
        with ordinary_segments():
            assert settings() == OFF
        assert settings() == before
    with pytest.raises(RuntimeError, match="a stage failed"), ordinary_segments():
        raise RuntimeError("a stage failed")
    assert settings() == before


class Looking(RecordingEngine):
    seen: dict[str, str]

    def resume(self, part: MemoryTag) -> None:
        self.seen[f"resume {part.value}"] = settings()
        super().resume(part)

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        self.seen["load"] = settings()
        super().load(staged, handles)

    def serve(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        self.seen["serve"] = settings()
        return super().serve()


@pytest.mark.shows("3.12")
def test_in_a_phase_memory_is_ordinary_and_in_training_as_it_was_set() -> None:
    device = recording_device(kind=Looking)
    engine, manager = device.engine, device.manager
    assert isinstance(engine, Looking)
    torch._C._accelerator_setAllocatorSettings(ON)
    for version in range(2):
        manager.weights_changed(version=version)
        engine.seen = {}
        with manager.rollout_phase():
            engine.serve()
        assert engine.seen.keys() == {
            *(f"resume {part.value}" for part in MemoryTag),
            *("load", "serve"),
        }
        assert set(engine.seen.values()) == {OFF}
        assert settings() == ON


MIB = 2**20
BLOCK = 100 * MIB
NOISE = 20 * MIB


def hold(num_bytes: int, *, device: torch.device = CPU) -> torch.Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8, device=device)


def hold_pages(num_bytes: int) -> torch.Tensor:
    """Memory of the kernel alone: malloc may answer from what earlier tests freed, or keep it."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8).fill_(1)


def peaks(metrics: Metrics) -> dict[str, float]:
    return {name.split("/")[1].removesuffix("_peak_bytes"): m.value for name, m in metrics.items()}


def test_a_peak_is_seen_by_its_scope_and_those_around_it_alone() -> None:
    meter = PeakMeter(CPU)
    for _ in range(2):
        with meter("before"):
            pass
        with meter("outer"):
            with meter("inner"):
                hold_pages(BLOCK)
            with meter("later"):
                pass
        with meter("after"):
            pass
        found = peaks(meter.take_metrics())
        assert BLOCK - MIB < found["inner"] <= found["outer"] < BLOCK + NOISE
        assert max(found["before"], found["later"], found["after"]) < NOISE
        assert meter.take_metrics() == {}


def test_a_scope_counts_what_stays_and_its_larger_peak_also_when_it_raises() -> None:
    meter = PeakMeter(CPU)
    kept = hold_pages(BLOCK)
    with pytest.raises(ValueError, match="on purpose"), meter("outer"), meter("inner"):
        raise ValueError("on purpose")
    for num_bytes in (2 * BLOCK, BLOCK):
        with meter("twice"):
            hold_pages(num_bytes)
    found = peaks(meter.take_metrics())
    assert list(found) == ["inner", "outer", "twice"]
    assert min(found["inner"], found["outer"]) > BLOCK - MIB
    assert found["twice"] > 3 * BLOCK - 2 * MIB
    del kept


def test_once_settled_a_scope_is_measured_without_what_malloc_kept() -> None:
    first = PeakMeter(CPU)
    first.settle()
    with first("what earlier tests freed"):  # a block from there would not grow the process
        pass
    meter = PeakMeter(CPU)
    # Small blocks come from malloc's heap; the last one keeps the heap from shrinking by itself.
    blocks = [hold(64 * 1024) for _ in range(BLOCK // (64 * 1024))]
    last = hold(64 * 1024)
    del blocks
    with meter("unsettled"):
        pass
    meter.settle()
    with meter("settled"):
        pass
    found = peaks(meter.take_metrics())
    # Some of the blocks may lie in pages that the process already held, and the collector of other
    # tests' garbage may give some back meanwhile: so only half of them must have been kept.
    assert found["settled"] < BLOCK // 4 < BLOCK // 2 < found["unsettled"]
    del last


@pytest.mark.gpu
def test_on_a_gpu_torchs_own_peak_counts() -> None:
    device = torch.device("cuda:0")
    meter = PeakMeter(device)
    with meter("outer"), meter("inner"):
        hold(BLOCK, device=device)
    found = peaks(meter.take_metrics())
    assert found["outer"] == found["inner"] >= BLOCK
