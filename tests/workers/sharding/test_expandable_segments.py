"""Expandable segments are off while a rollout engine has the device, and back for training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.memory import ordinary_segments
from tests.workers.sharding.recording import RecordingEngine, recording_device

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
def test_segments_are_off_within_and_other_settings_stay() -> None:
    torch._C._accelerator_setAllocatorSettings(ON)
    for _ in range(2):
        with ordinary_segments():
            assert settings() == OFF
        assert settings() == ON
    with pytest.raises(RuntimeError, match="a stage failed"), ordinary_segments():
        raise RuntimeError("a stage failed")
    assert settings() == ON


def test_who_does_not_use_them_keeps_what_is_set() -> None:
    torch._C._accelerator_setAllocatorSettings(OFF)
    with ordinary_segments():
        assert settings() == OFF
    assert settings() == OFF


class Looking(RecordingEngine):
    """Looks at torch's settings whenever memory moves or is shared."""

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
