"""Expandable segments are off while a rollout engine has the device, and back for training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybridrl.workers.sharding.expandable_segments import ordinary_segments

ON = "expandable_segments:True,max_split_size_mb:128"
OFF = "expandable_segments:False,max_split_size_mb:128"


def settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


@pytest.fixture(autouse=True)
def _settings_of_this_process() -> Iterator[None]:
    before = settings()
    yield
    torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def test_they_are_off_within_also_after_an_error_and_other_settings_stay() -> None:
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
