"""An error that not all ranks share, in the middle of a stage: nobody serves and nobody trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import pytest
import torch.distributed as dist

from hybridrl.errors import DeadlineError, PhaseError
from hybridrl.workers.sharding.control import ControlGroup, Failures
from hybridrl.workers.sharding.lifecycle import SleepLevel
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager import ShardingManager
from tests.ranks import run_ranks
from tests.workers.sharding.engine_set import LocalSet
from tests.workers.sharding.recording import (
    CPU,
    Journal,
    RecordingEngine,
    RecordingTrainEngine,
    Rig,
    rollout_config,
)


class UnreachableSet(LocalSet):
    """Engines that do a stage and are not heard of again."""

    lost_in = ""

    def run(
        self, stage: str, action: Callable[[ManagedEngine], None], *, members: Collection[int]
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


def _rig(depth: SleepLevel, lost_in: str) -> Rig:
    rig = Rig(depth=depth)
    rig.set.__class__ = UnreachableSet
    rig.cycle()
    rig.life.sleep()
    assert isinstance(rig.set, UnreachableSet)
    rig.set.lost_in = lost_in
    return rig


def _wake_and_sleep(rig: Rig) -> None:
    rig.life.wake()
    rig.life.sleep()


ALWAYS = ("sync", "resume_cache", "continue", "pause", "drain")
STAGES = [
    *((depth, stage) for depth in SleepLevel for stage in ALWAYS),
    *((SleepLevel.RELEASE_ALL, "resume_weights"), (SleepLevel.RELEASE_ALL, "release")),
    (SleepLevel.RELEASE_CACHE, "release_cache"),
]


@pytest.mark.parametrize(("depth", "stage"), STAGES)
def test_after_a_missed_deadline_neither_serving_nor_training_is_allowed_and_the_stage_is_named(
    depth: SleepLevel, stage: str
) -> None:
    rig = _rig(depth, stage)
    with pytest.raises(DeadlineError, match=stage):
        _wake_and_sleep(rig)
    num_events = len(rig.journal.events)
    for _ in range(2):
        assert not rig.life.may_train
        assert rig.life.describe().endswith(f"; {stage} did not end")
        for again in (rig.life.wake, rig.life.sleep):
            with pytest.raises(PhaseError, match=f"^stage {stage} did not end, so no rank knows"):
                again()
    assert len(rig.journal.events) == num_events, "somebody was asked something all the same"


def test_sleeping_in_the_middle_of_a_sync_is_refused() -> None:
    rig = Rig()
    refused = []
    real_receive = ManagedEngine.receive

    def receive(managed: ManagedEngine, tensors: list[tuple[str, object]]) -> None:
        with pytest.raises(PhaseError, match="stage sync did not end"):
            rig.life.sleep()
        refused.append(not rig.life.may_train)
        real_receive(managed, tensors)  # type: ignore[arg-type]

    rig.set.engines[1].receive = receive.__get__(rig.set.engines[1])  # type: ignore[method-assign]
    for _ in range(2):
        rig.life.wake()
        rig.check_serving()
        rig.life.sleep()
    assert refused == [True] * 6  # three buckets in each of two syncs


# -- two real ranks ----------------------------------------------------------------------------


class HangingEngine(RecordingEngine):
    """An engine that does not come back from a resume in time."""

    hangs_s = 0.0

    def update_weights(self, tensors: object) -> None:
        time.sleep(self.hangs_s)
        super().update_weights(tensors)  # type: ignore[arg-type]


def _one_rank_hangs_in_a_sync(rank: int, sleep: bool) -> list[str]:
    journal = Journal()
    engine = HangingEngine(rank, journal)
    manager = ShardingManager(
        engine=engine,
        config=rollout_config(sleep=sleep),
        device=CPU,
        control=ControlGroup(timeout_s=1.0),
    )
    trainer = RecordingTrainEngine(journal)
    manager.attach_policy(trainer)
    with manager.rollout_phase():
        engine.serve()
    manager.weights_changed(version=1)
    engine.hangs_s = 4.0 * rank
    texts = []
    for attempt in (manager.rollout_phase, manager.rollout_phase):
        try:
            with attempt():
                raise AssertionError("an engine was lent")
        except (DeadlineError, PhaseError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    with pytest.raises(PhaseError) as raised:
        manager.require_training()
    texts.append(str(raised.value))
    dist.barrier()
    return texts


@pytest.mark.parametrize("sleep", [True, False])
def test_when_a_rank_hangs_in_a_wake_up_no_rank_lends_its_engine_or_trains(sleep: bool) -> None:
    for missed, again, training in run_ranks(2, _one_rank_hangs_in_a_sync, sleep):
        assert missed.startswith("DeadlineError: stream: not all 2 ranks answered within 1.5 s")
        assert again.startswith("PhaseError: stage sync did not end, so no rank knows where the ")
        assert again.endswith("; end the worker group and start it anew")
        assert "sync did not end" in training
