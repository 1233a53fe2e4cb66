"""What an engine says that it gives back, and what is seen of it; what a resume needs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from hybridrl.errors import EngineError
from hybridrl.metrics import Sum, check_declared
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding import memory as memory_module
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.memory import Holder, demanded_bytes
from tests.workers.sharding.recording import CountedMemory, Journal, RecordingEngine, managed_engine

TOTAL = 1000


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of these tests hold bytes, not gibibytes."""
    monkeypatch.setattr(memory_module, "_KERNELS_BYTES", 0)


class Overstating(RecordingEngine):
    """Says that it holds more than it can give back."""

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
        ("sglang", MemoryTag.KV_CACHE, "set rollout.memory_fraction=0.71 (it is 0.85)"),
        ("sglang", MemoryTag.WEIGHTS, "set rollout.tensor_parallel_size=2, or train on more rank"),
        ("hf", MemoryTag.KV_CACHE, "set rollout.num_slots=1 (it is 2)"),
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
