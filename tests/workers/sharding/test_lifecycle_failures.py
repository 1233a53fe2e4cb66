"""What is left after a failure: at every call, of every engine, before and after its work."""

from __future__ import annotations

import pytest

from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import SleepLevel
from hybridrl.workers.sharding.states import State
from tests.workers.sharding.recording import TENANT, Policy, Rig

FALLING_ASLEEP = [("pause", ""), ("drain", "")]
RELEASE = [("release", part.value) for part in MemoryTag]
WAKING = [
    ("resume", "weights"),
    ("update_weights", ""),
    ("finish_update", ""),
    ("resume", "kv_cache"),
    ("resume", "cuda_graph"),
    ("continue_generation", ""),
]
MAKE_ROOM = [("offload", "gradients"), ("offload", "optimizer")]
LEAVE = [("full_weights", ""), ("offload", "parameters")]
COME_BACK = [("restore", part) for part in ("parameters", "gradients", "optimizer")]

both_sides_of_the_work = pytest.mark.parametrize("when", ["before", "after"])
each_engine = pytest.mark.parametrize("engine", [0, 1, 2])


def _rig_after_one_cycle(depth: SleepLevel = SleepLevel.RELEASE_ALL) -> Rig:
    rig = Rig(num_engines=3, depth=depth)
    rig.cycle()
    return rig


@pytest.mark.parametrize("call", WAKING, ids=" ".join)
@pytest.mark.parametrize("depth", SleepLevel)
@each_engine
@both_sides_of_the_work
def test_a_wake_up_that_fails_at_an_engine_ends_in_training_and_the_next_one_serves(
    call: tuple[str, str], depth: SleepLevel, engine: int, when: str
) -> None:
    rig = _rig_after_one_cycle(depth)
    rig.journal.fail(engine, *call, when=when)
    if call[0] == "resume" and not _is_released(call[1], depth):
        rig.cycle()  # nothing to resume, so nothing that could fail
        return
    with pytest.raises(StageError, match=rf"failed on engine {engine}: .*{call[0]}") as raised:
        rig.life.wake()
    assert list(raised.value.failures) == [engine]
    rig.check_training()
    assert rig.journal.calls(engine).count("restart") == 1
    for _ in range(2):
        rig.cycle()


def _is_released(part: str, depth: SleepLevel) -> bool:
    return depth is SleepLevel.RELEASE_ALL or (
        depth is SleepLevel.RELEASE_CACHE and part != "weights"
    )


@pytest.mark.parametrize("call", MAKE_ROOM + LEAVE, ids=" ".join)
@both_sides_of_the_work
def test_a_wake_up_that_fails_at_the_trainer_ends_in_training_and_the_next_one_serves(
    call: tuple[str, str], when: str
) -> None:
    rig = _rig_after_one_cycle()
    rig.journal.fail(TENANT, *call, when=when)
    with pytest.raises(StageError, match=call[0]):
        rig.life.wake()
    rig.check_training()
    for _ in range(2):
        rig.cycle()


@pytest.mark.parametrize("call", FALLING_ASLEEP, ids=" ".join)
@pytest.mark.parametrize("depth", SleepLevel)
@each_engine
@both_sides_of_the_work
def test_when_an_engine_does_not_stop_nothing_is_released_and_all_serve_again(
    call: tuple[str, str], depth: SleepLevel, engine: int, when: str
) -> None:
    rig = _rig_after_one_cycle(depth)
    rig.life.wake()
    rig.journal.events.clear()
    rig.journal.fail(engine, *call, when=when)
    with pytest.raises(StageError, match=f"{call[0]} failed on engine {engine}: "):
        rig.life.sleep()
    rig.check_serving()
    assert not rig.life.may_train
    assert not [call for call in rig.journal.calls() if call.startswith(("release", "restore"))]
    rig.life.sleep()
    rig.check_training()
    rig.cycle()


@pytest.mark.parametrize("depth", [SleepLevel.RELEASE_ALL, SleepLevel.KEEP_ALL])
@each_engine
@both_sides_of_the_work
def test_an_engine_that_neither_stops_nor_goes_on_is_broken_and_the_others_serve(
    depth: SleepLevel, engine: int, when: str
) -> None:
    rig = _rig_after_one_cycle(depth)
    rig.life.wake()
    rig.journal.fail(engine, "drain")
    rig.journal.fail(engine, "continue_generation", when=when)
    with pytest.raises(StageError, match=f"drain failed on engine {engine}"):
        rig.life.sleep()
    expected = [State.READY] * 3
    expected[engine] = State.BROKEN
    assert rig.life.states == tuple(expected)
    for index in {0, 1, 2} - {engine}:
        rig.engines[index].serve()
    rig.life.sleep()
    assert rig.journal.calls(engine).count("restart") == 1
    rig.check_training()
    rig.cycle()


@pytest.mark.parametrize("call", RELEASE, ids=" ".join)
@each_engine
@both_sides_of_the_work
def test_an_engine_that_does_not_release_is_restarted_and_the_step_goes_on(
    call: tuple[str, str], engine: int, when: str
) -> None:
    rig = _rig_after_one_cycle()
    for _ in range(2):
        rig.life.wake()
        rig.journal.events.clear()
        rig.journal.fail(engine, *call, when=when)
        rig.life.sleep()
        assert rig.journal.calls(engine).count("restart") == 1
        rig.check_training()
        rig.cycle()


@pytest.mark.parametrize("failed", ["resume", "release", "restart"])
@each_engine
@both_sides_of_the_work
def test_an_engine_that_does_not_restart_stays_broken_until_the_next_wake_up(
    failed: str, engine: int, when: str
) -> None:
    rig = _rig_after_one_cycle()
    if failed == "release":
        rig.life.wake()
        rig.journal.fail(engine, "release", "kv_cache")
        rig.journal.fail(engine, "restart", when=when)
        with pytest.raises(StageError, match=f"restart failed on engine {engine}"):
            rig.life.sleep()
    else:
        rig.journal.fail(engine, "resume", "weights")
        rig.journal.fail(engine, "restart", when=when, times=2 if failed == "restart" else 1)
        with pytest.raises(StageError, match=f"resume_weights failed on engine {engine}"):
            rig.life.wake()
    assert rig.life.states[engine] is State.BROKEN
    rig.check_training()
    if failed == "restart":
        with pytest.raises(StageError, match=f"restart failed on engine {engine}"):
            rig.life.wake()
        assert rig.life.states[engine] is State.BROKEN
        rig.check_training()
    rig.train()
    for _ in range(2):
        rig.cycle()


def test_of_two_broken_engines_the_one_that_restarts_is_put_to_sleep() -> None:
    rig = _rig_after_one_cycle()
    for engine in (0, 1):
        rig.journal.fail(engine, "update_weights")
    rig.journal.fail(0, "restart")
    with pytest.raises(StageError, match=r"sync failed on engine 0: .*; engine 1: "):
        rig.life.wake()
    assert rig.life.states == (State.BROKEN, State.ASLEEP, State.ASLEEP)
    rig.check_training()
    rig.cycle()


def test_a_broken_engine_boots_on_an_empty_device() -> None:
    rig = _rig_after_one_cycle()
    rig.journal.fail(1, "update_weights")
    rig.journal.fail(1, "restart")
    with pytest.raises(StageError, match="sync failed on engine 1"):
        rig.life.wake()
    rig.journal.events.clear()
    rig.life.wake()
    rig.check_serving()
    calls = rig.journal.calls()
    booted = calls.index("restart")
    assert calls[:booted].count("offload parameters") == 2
    assert "restore parameters" in calls[booted : calls.index("full_weights")]


@pytest.mark.parametrize("call", FALLING_ASLEEP, ids=" ".join)
def test_an_engine_that_cannot_be_stopped_while_unwinding_is_restarted(
    call: tuple[str, str],
) -> None:
    rig = _rig_after_one_cycle()
    rig.journal.fail(0, "continue_generation")  # when the others serve already
    rig.journal.fail(2, *call)
    with pytest.raises(StageError, match="continue failed on engine 0: continue_generation"):
        rig.life.wake()
    rig.check_training()
    assert [rig.journal.calls(engine).count("restart") for engine in range(3)] == [1, 0, 1]
    rig.cycle()


@pytest.mark.parametrize("call", COME_BACK, ids=" ".join)
@both_sides_of_the_work
def test_training_is_refused_until_its_state_came_back(call: tuple[str, str], when: str) -> None:
    rig = _rig_after_one_cycle()
    rig.life.wake()
    rig.journal.fail(TENANT, *call, when=when, times=2)
    for _ in range(2):
        with pytest.raises(
            StageError, match="onload_training failed on rank 0: InjectedFault: restore"
        ):
            rig.life.sleep()
        assert set(rig.life.states) == {State.ASLEEP}
        assert not rig.life.may_train
    rig.life.sleep()
    rig.check_training()
    rig.cycle()


def test_the_first_of_two_failures_is_raised() -> None:
    rig = _rig_after_one_cycle()
    rig.journal.fail(0, "resume", "kv_cache")
    rig.journal.fail(2, "release", "weights")  # while unwinding
    rig.journal.fail(TENANT, "restore", "parameters")
    with pytest.raises(StageError, match="resume_cache failed on engine 0: resume kv_cache"):
        rig.life.wake()
    assert not rig.life.may_train
    rig.life.sleep()
    rig.check_training()
    rig.cycle()


def test_all_engines_at_fault_are_named() -> None:
    rig = _rig_after_one_cycle()
    for engine in (2, 0):
        rig.journal.fail(engine, "resume", "weights")
    with pytest.raises(StageError, match=r"^resume_weights failed on engine 0: .*; engine 2: "):
        rig.life.wake()
    rig.check_training()
    rig.cycle()


def test_with_a_resident_base_a_failed_wake_up_restarts_the_engine_at_fault_alone() -> None:
    rig = Rig(num_engines=3, depth=SleepLevel.RELEASE_CACHE, policy=Policy.ADAPTER_KEPT_BASE)
    for engine in rig.engines:
        engine.keeps_backup = False
    rig.cycle()
    for call in ("kv_cache", "cuda_graph"):
        rig.journal.events.clear()
        rig.journal.fail(1, "resume", call)
        with pytest.raises(StageError, match="resume_cache failed on engine 1"):
            rig.life.wake()
        assert rig.life.states == (State.KV_ASLEEP, State.ASLEEP, State.KV_ASLEEP)
        assert [rig.journal.calls(engine).count("restart") for engine in range(3)] == [0, 1, 0]
        assert "release weights" not in rig.journal.calls(0) + rig.journal.calls(2)
        rig.check_training()
        rig.cycle()
