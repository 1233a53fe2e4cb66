"""Lines of docs/behaviours.md that no other test shows: who is asked what, and when not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hybridrl.metrics import Sum
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import SleepLevel
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.sharding.states import State
from tests.workers.sharding.recording import CPU, Event, Journal, RecordingEngine, Rig
from tests.workers.sharding.test_manager import _device


@pytest.mark.parametrize("depth", SleepLevel)
def test_a_broken_engine_is_asked_nothing_but_to_restart(depth: SleepLevel) -> None:
    rig = Rig(num_engines=3, depth=depth)
    rig.cycle()
    rig.life.wake()
    rig.journal.dead.add(1)
    with pytest.raises(StageError, match="pause failed on engine 1: engine 1 is dead"):
        rig.life.sleep()
    assert rig.life.states == (State.READY, State.BROKEN, State.READY)
    rig.journal.events.clear()
    rig.life.sleep()
    calls = rig.journal.calls(1)
    assert calls[0] == "restart"
    others = rig.journal.calls()[: rig.journal.calls().index("restart")]
    assert others.count("pause") == others.count("drain") == 2
    rig.check_training()
    rig.cycle()


def test_without_sleep_weights_are_updated_between_drained_and_continued_on_all_engines() -> None:
    rig = Rig(num_engines=3, depth=SleepLevel.KEEP_ALL)
    rig.cycle()
    for _ in range(2):
        rig.life.wake()
        rig.journal.events.clear()
        rig.life.sleep()
        rig.train()
        rig.life.wake()
        rig.check_serving()
        calls = rig.journal.calls()
        steps = ["pause", "drain", "update_weights", "finish_update", "continue_generation"]
        assert set(calls) == {*steps, "full_weights"}
        for earlier, later in pairwise(steps):
            last_of_earlier = len(calls) - 1 - calls[::-1].index(earlier)
            assert last_of_earlier < calls.index(later), f"{later} before all had done {earlier}"


def test_no_engine_continues_before_all_have_their_cache_even_if_one_had_to_be_restarted() -> None:
    rig = Rig(num_engines=3)
    rig.cycle()
    rig.journal.events.clear()
    rig.journal.fail(1, "resume", "kv_cache", when="after")
    with pytest.raises(StageError, match="resume_cache failed on engine 1"):
        rig.life.wake()
    assert rig.journal.calls().count("resume kv_cache") == 3
    assert "continue_generation" not in rig.journal.calls()
    rig.check_training()
    rig.cycle()


class EmptiedMemory(DeviceMemory):
    """A device whose cache is emptied in the journal."""

    journal: Journal

    def empty_cache(self) -> None:
        self.journal.events.append(Event(-2, "empty_cache"))


def test_the_allocators_cache_is_emptied_before_every_resume() -> None:
    rig = Rig()
    memory = EmptiedMemory(CPU)
    memory.journal = rig.journal
    for managed in rig.set.engines:
        managed.memory = memory
    for _ in range(2):
        rig.journal.events.clear()
        rig.cycle()
        calls = rig.journal.calls()
        resumes = [place for place, call in enumerate(calls) if call.startswith("resume")]
        assert len(resumes) == 2 * 3
        assert all(calls[place - 1] == "empty_cache" for place in resumes)


class BusyEngine(RecordingEngine):
    """Two of its requests do not end before the deadline."""

    def drain(self, *, timeout_s: float) -> int:
        super().drain(timeout_s=timeout_s)
        return 2


def test_aborted_requests_are_counted() -> None:
    managed = ManagedEngine(
        BusyEngine(0, Journal()),
        device=CPU,
        sleeps=True,
        backs_up_everything=False,
        drain_timeout_s=1.0,
        release_timeout_s=1.0,
    )
    for _ in range(2):
        managed.drain()
        managed.drain()
        assert managed.take_metrics() == {"rollout/aborted_requests": Sum(4)}


@pytest.mark.parametrize("sleep", [True, False])
def test_what_needs_training_alone_between_two_phases_moves_no_engine_and_sends_no_weights(
    sleep: bool,
) -> None:
    """As saving a checkpoint does: engines are at rest already, and stay so."""
    device = _device(sleep=sleep)
    for _ in range(2):
        device.serve()
        device.journal.events.clear()
        device.manager.require_training()
        dict(device.trainer.full_weights())
        assert device.journal.calls() == ["full_weights"]
        device.serve()
        num_streams = device.journal.calls().count("full_weights") - 1
        assert num_streams == (1 if sleep else 0)  # without sleep nothing was lost or changed
