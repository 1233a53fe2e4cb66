"""Random fire on two real ranks: both leave a phase with the same error, and the next one works."""

from __future__ import annotations

import logging
import random

import pytest

from hybridrl.workers.sharding.control import StageError
from tests.ranks import run_ranks
from tests.workers.sharding.recording import TENANT, RecordingDevice, recording_device
from tests.workers.sharding.test_random_fire import ENGINE_CALLS, TENANT_CALLS

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


def _check(seeds: range) -> None:
    here, there = run_ranks(NUM_RANKS, _many_sequences, seeds, deadline_s=150.0)
    for seed, ours, theirs in zip(seeds, here, there, strict=True):
        assert ours == theirs, f"seed {seed}"
    failed = [ending for endings in here for ending in endings if ending != "ended well"]
    assert len(failed) > len(seeds) / 2, "the fire was too weak to show anything"


@pytest.mark.shows("2.16", "R9.2")
def test_12_sequences_of_faults_take_both_ranks_out_alike() -> None:
    _check(range(12))


@pytest.mark.nightly
@pytest.mark.parametrize("tenth", range(10))
def test_100_sequences_of_random_faults_take_both_ranks_out_alike(tenth: int) -> None:
    _check(range(1000 + 50 * tenth, 1050 + 50 * tenth))
