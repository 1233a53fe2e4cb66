from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from hybridrl.errors import PhaseError
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import RESTING, SleepLevel, State
from tests.ranks import run_ranks
from tests.workers.sharding.recording import (
    ADAPTER,
    TENANT,
    WEIGHTS,
    Policy,
    RecordingDevice,
    recording_device,
)
from tests.workers.sharding.test_lifecycle_failures import (
    COME_BACK,
    FALLING_ASLEEP,
    LEAVE,
    MAKE_ROOM,
    RELEASE,
    WAKING,
)
from tests.workers.sharding.watched import WatchedRig

ENGINE_CALLS = FALLING_ASLEEP + RELEASE + WAKING + [("restart", "")]
ADAPTER_CALLS = [("unload_adapter", ""), ("load_adapter", "")]
TENANT_CALLS = MAKE_ROOM + LEAVE + COME_BACK


@dataclass(frozen=True)
class Shot:
    """A fault that is yet to find its engine, or the tenants."""

    call: tuple[str, str]
    victim: int
    when: str
    times: int
    skip: int

    def fire(self, rig: WatchedRig) -> None:
        victim = TENANT if self.call in TENANT_CALLS else self.victim % len(rig.engines)
        rig.journal.fail(victim, *self.call, when=self.when, times=self.times, skip=self.skip)


SHOTS = st.lists(
    st.builds(
        Shot,
        call=st.sampled_from(ENGINE_CALLS + ADAPTER_CALLS + TENANT_CALLS),
        victim=st.integers(0, 7),
        when=st.sampled_from(["before", "after"]),
        times=st.sampled_from([1, 1, 2, 3]),
        skip=st.sampled_from([0, 0, 0, 1, 2]),
    ),
    max_size=4,
)

HALF_WAY = {State.BOOT, State.PAUSED, State.WEIGHTS_UP, State.SYNCED, State.CACHE_UP}


class RandomFire(RuleBasedStateMachine):
    """Whatever fails, nobody serves garbage, and one more try without faults mends all."""

    rig: WatchedRig

    @initialize(
        num_engines=st.integers(1, 8),
        depth=st.sampled_from(SleepLevel),
        policy=st.sampled_from(Policy),
    )
    def boot(self, num_engines: int, depth: SleepLevel, policy: Policy) -> None:
        self.rig = WatchedRig(num_engines, depth=depth, policy=policy)

    @rule(victim=st.integers(0, 7))
    def kill(self, victim: int) -> None:
        self.rig.journal.dead.add(victim % len(self.rig.engines))

    @rule(name=st.sampled_from([*WEIGHTS, *ADAPTER]))
    def forget(self, name: str) -> None:
        """The next sync leaves out a tensor that it promised, but never all of a base."""
        forgotten = self.rig.journal.forgotten | {name}
        if not forgotten.issuperset(WEIGHTS):  # a pass without a bucket would be no pass
            self.rig.journal.forgotten.add(name)

    # Operations: each ends well or in a named error; anything else fails the test.

    @rule(shots=SHOTS)
    def sleep(self, shots: Sequence[Shot] = ()) -> None:
        self._fire(shots)
        try:
            self.rig.life.sleep()
        except StageError:
            return
        self.rig.check_training()
        if State.BROKEN not in self.rig.life.states:
            self.rig.check_asleep_bytes()

    @rule(shots=SHOTS)
    def wake(self, shots: Sequence[Shot] = ()) -> None:
        self._fire(shots)
        states = set(self.rig.life.states)
        try:
            self.rig.life.wake()
        except StageError:
            return
        except PhaseError:  # some serve and some are broken, after a sleep that failed
            assert states == {State.READY, State.BROKEN}
            return
        assert states <= RESTING or states == {State.READY}
        self.rig.check_serving()
        self.rig.check_awake_bytes()

    @rule()
    def generate(self) -> None:
        for engine, state in zip(self.rig.engines, self.rig.life.states, strict=True):
            if state is State.READY:
                self.rig.check_answer(engine)

    @rule()
    def train(self) -> None:
        if self.rig.life.may_train:
            self.rig.check_training()
            self.rig.train()

    @rule(waking=SHOTS, sleeping=SHOTS, is_step=st.booleans())
    def phase(self, waking: Sequence[Shot], sleeping: Sequence[Shot], is_step: bool) -> None:
        """A whole phase, of a training step or of an evaluation, after which nobody trains."""
        self.sleep()
        self.wake(waking)
        self.generate()
        self.sleep(sleeping)
        if is_step:
            self.train()

    @rule()
    def cease_fire(self) -> None:
        """Without faults the next try serves; each dead engine may cost one, to be found out."""
        self.rig.journal.faults.clear()
        self.rig.journal.forgotten.clear()
        for num_spare in range(len(self.rig.journal.dead), -1, -1):
            try:
                self.rig.life.sleep()
                self.rig.life.wake()
                break
            except StageError:
                assert num_spare
        self.rig.check_serving()
        self.rig.check_awake_bytes()
        self.rig.life.sleep()
        self.rig.check_training()
        self.rig.check_asleep_bytes()
        self.rig.train()

    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        self.rig.look()

    @invariant()
    def no_engine_is_left_half_way(self) -> None:
        states = set(self.rig.life.states)
        assert not states & HALF_WAY
        assert State.DRAINED not in states or self.rig.depth is SleepLevel.KEEP_ALL
        assert State.KV_ASLEEP not in states or self.rig.depth is SleepLevel.RELEASE_CACHE

    def teardown(self) -> None:
        self.cease_fire()

    def _fire(self, shots: Sequence[Shot]) -> None:
        for shot in shots:
            shot.fire(self.rig)


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Thousands of faults would be logged, each with its traceback."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.shows("1.7", "1.16", "2.16", "3.3", "4.15", "4.21", "5.2", "R9.1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "num_sequences",
    [30, *(pytest.param(1000, marks=pytest.mark.nightly, id=f"new {n}") for n in range(10))],
)
def test_sequences_of_random_faults_leave_nobody_half_awake(num_sequences: int) -> None:
    run_state_machine_as_test(
        RandomFire,
        settings=settings(
            max_examples=num_sequences,
            stateful_step_count=30,
            derandomize=num_sequences == 30,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


NUM_RANKS = 2


def _fire(device: RecordingDevice, chance: random.Random, *, rank: int) -> None:
    """Draw up to two faults, alike on all ranks, and place those that are this rank's."""
    for _ in range(chance.randint(0, 2)):
        call = chance.choice(ENGINE_CALLS + TENANT_CALLS)
        victim = chance.randrange(NUM_RANKS)
        when = chance.choice(["before", "after"])
        times, skip = chance.choice([1, 1, 2]), chance.choice([0, 0, 0, 1])
        if victim == rank:
            target = TENANT if call in TENANT_CALLS else rank
            device.journal.fail(target, *call, when=when, times=times, skip=skip)


def _phase_under_fire(device: RecordingDevice, chance: random.Random, *, rank: int) -> str:
    _fire(device, chance, rank=rank)
    sleeping = random.Random(chance.random())  # drawn from also by a phase that ends before it
    try:
        with device.manager.rollout_phase():
            assert device.engine is not None
            device.engine.serve()
            _fire(device, sleeping, rank=rank)
    except StageError as error:
        return str(error)
    finally:
        device.journal.faults.clear()
    return "ended well"


def _three_steps_under_fire(rank: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    device = recording_device(rank, sleep=chance.random() < 0.75)
    endings = []
    for _ in range(3):
        endings.append(_phase_under_fire(device, chance, rank=rank))
        assert device.serve(), f"seed {seed}: not the newest weights after {endings[-1]}"
        device.train()
    return endings


def _many_sequences(rank: int, seeds: range) -> list[list[str]]:
    logging.disable(logging.WARNING)  # hundreds of tracebacks
    return [_three_steps_under_fire(rank, seed) for seed in seeds]


@pytest.mark.shows("2.16", "R9.2")
@pytest.mark.parametrize(
    ("first", "num_seeds"),
    [(0, 12), *(pytest.param(1000 + 50 * n, 50, marks=pytest.mark.nightly) for n in range(10))],
)
def test_sequences_of_faults_take_both_ranks_out_alike(first: int, num_seeds: int) -> None:
    seeds = range(first, first + num_seeds)
    here, there = run_ranks(NUM_RANKS, _many_sequences, seeds, deadline_s=150.0)
    for seed, ours, theirs in zip(seeds, here, there, strict=True):
        assert ours == theirs, f"seed {seed}"
    failed = [ending for endings in here for ending in endings if ending != "ended well"]
    assert len(failed) > len(seeds) / 2, "the fire was too weak to show anything"
