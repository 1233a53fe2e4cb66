from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import pytest
import torch.distributed as dist

from hybridrl.errors import DeadlineError, PhaseError
from hybridrl.workers.rollout.buckets import StagedBucket
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import Failures, StageError
from hybridrl.workers.sharding.lifecycle import SleepLevel, State
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from tests.ranks import run_ranks
from tests.workers.sharding.engine_set import LocalSet
from tests.workers.sharding.recording import TENANT, Policy, RecordingEngine, Rig, recording_device

FALLING_ASLEEP = [("pause", ""), ("drain", "")]
RELEASE = [("release", part.value) for part in MemoryTag]
WAKING = [
    ("resume", "weights"),
    ("load", ""),
    ("finish_update", ""),
    ("resume", "kv_cache"),
    ("resume", "cuda_graph"),
    ("continue_generation", ""),
]
MAKE_ROOM = [("offload", "gradients"), ("offload", "optimizer")]
LEAVE = [("full_weights", ""), ("offload", "parameters")]
COME_BACK = [("restore", part) for part in ("parameters", "gradients", "optimizer")]

both_sides_of_the_work = pytest.mark.parametrize("when", ["before", "after"])
each_engine = pytest.mark.parametrize("engine", [0, 2])  # of three


def _rig_after_one_cycle(
    depth: SleepLevel = SleepLevel.RELEASE_ALL, policy: Policy = Policy.WHOLE
) -> Rig:
    rig = Rig(num_engines=3, depth=depth, policy=policy)
    rig.cycle()
    return rig


@pytest.mark.shows("2.5")
@pytest.mark.parametrize("call", WAKING, ids=" ".join)
@pytest.mark.parametrize("depth", SleepLevel)
@each_engine
@both_sides_of_the_work
def test_a_wake_up_that_fails_at_an_engine_ends_in_training(
    call: tuple[str, str], depth: SleepLevel, engine: int, when: str
) -> None:
    rig = _rig_after_one_cycle(depth)
    rig.journal.fail(engine, *call, when=when)
    if call[0] == "resume" and not _is_released(call[1], depth):
        rig.cycle()  # nothing to resume, so nothing that could fail
        return
    rig.journal.events.clear()
    with pytest.raises(StageError, match=rf"failed on engine {engine}: .*{call[0]}") as raised:
        rig.life.wake()
    assert list(raised.value.failures) == [engine]
    rig.check_training()
    assert rig.journal.calls(engine).count("restart") == 1
    assert all(" ".join(call).strip() in rig.journal.calls(other) for other in range(3))
    has_continued = "continue_generation" in rig.journal.calls()
    assert has_continued == (call[0] == "continue_generation")  # all had their cache, or nobody did
    for _ in range(2):
        rig.cycle()


def _is_released(part: str, depth: SleepLevel) -> bool:
    return depth is SleepLevel.RELEASE_ALL or (
        depth is SleepLevel.RELEASE_CACHE and part != "weights"
    )


@pytest.mark.parametrize("call", MAKE_ROOM + LEAVE, ids=" ".join)
@both_sides_of_the_work
def test_a_wake_up_that_fails_at_the_trainer_ends_in_training(
    call: tuple[str, str], when: str
) -> None:
    rig = _rig_after_one_cycle()
    rig.journal.fail(TENANT, *call, when=when)
    with pytest.raises(StageError, match=call[0]):
        rig.life.wake()
    rig.check_training()
    for _ in range(2):
        rig.cycle()


@pytest.mark.shows("2.7")
@pytest.mark.parametrize("call", FALLING_ASLEEP, ids=" ".join)
@pytest.mark.parametrize("depth", SleepLevel)
@each_engine
@both_sides_of_the_work
def test_if_an_engine_does_not_stop_all_serve_again(
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


@pytest.mark.shows("4.12")
@pytest.mark.parametrize("call", RELEASE, ids=" ".join)
@each_engine
@both_sides_of_the_work
def test_an_engine_that_does_not_release_is_restarted(
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
def test_an_engine_that_does_not_restart_stays_broken(failed: str, engine: int, when: str) -> None:
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


@pytest.mark.shows("1.16", "4.12")
def test_of_two_broken_engines_one_restarts_at_once_and_one_on_an_empty_device() -> None:
    rig = _rig_after_one_cycle()
    for engine in (0, 1):
        rig.journal.fail(engine, "load")
    rig.journal.fail(0, "restart")
    with pytest.raises(StageError, match=r"sync failed on engine 0: .*; engine 1: "):
        rig.life.wake()
    assert rig.life.states == (State.BROKEN, State.ASLEEP, State.ASLEEP)
    rig.check_training()
    rig.journal.events.clear()
    rig.life.wake()
    rig.check_serving()
    calls = rig.journal.calls()
    booted = calls.index("restart")
    assert calls[:booted].count("offload parameters") == 2
    assert "restore parameters" in calls[booted : calls.index("full_weights")]
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


def test_a_failed_wake_up_restarts_one_engine_if_the_base_stays() -> None:
    rig = _rig_after_one_cycle(SleepLevel.RELEASE_CACHE, Policy.ADAPTER_KEPT_BASE)
    for engine in rig.engines:
        engine.keeps_backup = False
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


@pytest.mark.shows("2.6")
@pytest.mark.parametrize("depth", SleepLevel)
def test_a_broken_engine_is_asked_nothing_but_to_restart(depth: SleepLevel) -> None:
    rig = _rig_after_one_cycle(depth)
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


class UnreachableSet(LocalSet):
    """Engines that do a stage and are not heard of again."""

    lost_in = ""

    def run(
        self, stage: str, action: Callable[[ManagedEngine], object], *, members: Collection[int]
    ) -> Failures:
        failures = super().run(stage, action, members=members)
        self._lose(stage)
        return failures

    def sync(self) -> Failures:
        failures = super().sync()
        self._lose("sync")
        return failures

    def _lose(self, stage: str) -> None:
        if stage == self.lost_in:
            raise DeadlineError(f"{stage}: not all ranks answered within 1 s")


ALWAYS = ("sync", "resume_cache", "continue", "pause", "drain")
STAGES = [
    *((depth, stage) for depth in SleepLevel for stage in ALWAYS),
    *((SleepLevel.RELEASE_ALL, "resume_weights"), (SleepLevel.RELEASE_ALL, "release")),
    (SleepLevel.RELEASE_CACHE, "release_cache"),
]


@pytest.mark.shows("R9.3")
@pytest.mark.parametrize(("depth", "stage"), STAGES)
def test_after_a_missed_deadline_nobody_serves_or_trains(depth: SleepLevel, stage: str) -> None:
    rig = _rig_after_one_cycle(depth)
    rig.set.__class__ = UnreachableSet
    rig.set.lost_in = stage  # type: ignore[attr-defined]
    with pytest.raises(DeadlineError, match=stage):
        rig.life.wake()
        rig.life.sleep()
    num_events = len(rig.journal.events)
    for _ in range(2):
        assert not rig.life.may_train
        assert rig.life.describe().endswith(f"; {stage} did not end")
        for again in (rig.life.wake, rig.life.sleep):
            with pytest.raises(PhaseError, match=f"^stage {stage} did not end, so no rank knows"):
                again()
    assert len(rig.journal.events) == num_events, "somebody was asked something all the same"


@pytest.mark.shows("2.13")
def test_sleeping_in_the_middle_of_a_sync_is_refused() -> None:
    rig = Rig()
    refused = []
    real_load = ManagedEngine.load

    def load(managed: ManagedEngine, staged: StagedBucket, handles: Sequence[str]) -> None:
        with pytest.raises(PhaseError, match="stage sync did not end"):
            rig.life.sleep()
        refused.append(not rig.life.may_train)
        real_load(managed, staged, handles)

    rig.set.engines[1].load = load.__get__(rig.set.engines[1])  # type: ignore[method-assign]
    for _ in range(2):
        rig.life.wake()
        rig.check_serving()
        rig.life.sleep()
    assert refused == [True] * 6  # three buckets in each of two syncs


class HangingEngine(RecordingEngine):
    hangs_s = 0.0

    def load(self, staged: StagedBucket, handles: Sequence[str]) -> None:
        time.sleep(self.hangs_s)
        super().load(staged, handles)


def _one_rank_hangs_in_a_sync(rank: int, sleep: bool) -> list[str]:
    device = recording_device(rank, sleep=sleep, kind=HangingEngine, timeout_s=1.0)
    assert device.serve()
    device.train()
    device.engine.hangs_s = 4.0 * rank  # type: ignore[union-attr]
    texts = []
    for _ in range(2):
        with pytest.raises((DeadlineError, PhaseError)) as raised:
            device.serve()
        texts.append(f"{type(raised.value).__name__}: {raised.value}")
    with pytest.raises(PhaseError) as refused:
        device.manager.require_training()
    dist.barrier()
    return [*texts, str(refused.value)]


@pytest.mark.parametrize("sleep", [True, False])
def test_when_a_rank_hangs_in_a_wake_up_no_rank_goes_on(sleep: bool) -> None:
    for missed, again, training in run_ranks(2, _one_rank_hangs_in_a_sync, sleep):
        assert missed.startswith("DeadlineError: stream: not all 2 ranks answered within 1.5 s;")
        assert missed.endswith("If the stage is only slow, raise rollout.stage_timeout_s")
        assert again.startswith("PhaseError: stage sync did not end, so no rank knows where the ")
        assert again.endswith("; end the worker group and start a new one")
        assert "sync did not end" in training
