"""An engine that finds no room says once who has it."""

from __future__ import annotations

import pytest

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.memory import DeviceMemory, Holder, memory_table
from tests.workers.sharding.recording import CPU, RecordingEngine, recording_device


class CrampedEngine(RecordingEngine):
    """Finds no room for its KV cache."""

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
    assert DeviceMemory(CPU).figures() == []


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
