from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.batch import PromptBatch
from hybridrl.config.topology import Fused
from hybridrl.errors import EngineError, ServerDiedError
from hybridrl.metrics import Metrics
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.rollout.request_listener import RequestListener
from hybridrl.workers.sampling import ManagerSampling
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from hybridrl.workers.sharding.manager_client import NOBODY, Lent
from hybridrl.workers.sharding.weight_files import WeightSource
from tests.ranks import run_ranks
from tests.workers.rollout.engines import make_prompts, sampling_params
from tests.workers.sharding.recording import (
    TENANT,
    Journal,
    RecordingDevice,
    RecordingEngine,
    recording_device,
)
from tests.workers.sharding.test_publishing import RecordingServers, require_sent
from tests.workers.sharding.test_random_fire import ENGINE_CALLS, TENANT_CALLS

PROMPTS = make_prompts([3])
SAMPLING = sampling_params(group=1, tokens=1)


@dataclass
class RecordingListener:
    """The way to an engine, which notes when it is open, beside the calls of the engine."""

    rank: int
    journal: Journal
    is_open: bool = False

    def open(self) -> str:
        with self.journal.entry(self.rank, "open"):
            self.is_open = True
        return f"engine {self.rank}"

    def close(self) -> None:
        with self.journal.entry(self.rank, "close"):
            self.is_open = False


class Manager(RecordingServers):
    """Notes who is lent to it; loses the engines that a test names."""

    lost: tuple[int, ...] = ()
    failure: Exception | None = None
    dies: int | None = None
    """An engine that does so while the manager samples, which nobody reports."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal
        self.calls: list[tuple[int, list[str]]] = []

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, *, version: int, lent: Lent = NOBODY
    ) -> tuple[list[Sample], Metrics]:
        with self.journal.entry(0, "sample"):
            self.calls.append((version, list(lent[""])))
            if self.dies is not None:
                self.journal.dead.add(self.dies)
        if self.failure is not None:
            raise self.failure
        return [], {}

    def lost_engines(self) -> Mapping[str, Collection[int]]:
        return {"": self.lost}


def lend(device: RecordingDevice, manager: Manager, *, rank: int) -> ManagerSampling:
    return ManagerSampling(
        manager,
        engines=Fused(2, 1).engines,
        listener=cast(RequestListener, RecordingListener(rank, device.journal)),
        engine=device.engine,
        control=device.manager._control,
        sharding=device.manager,
    )


def phase(device: RecordingDevice, lent: ManagerSampling) -> None:
    with device.manager.rollout_phase() as engine:
        assert engine is device.engine
        lent.sample(PROMPTS, SAMPLING, version=device.version)


def _three_cycles(rank: int) -> tuple[list[list[str]], list[tuple[int, list[str]]]]:
    device = recording_device(rank, sleep=True)
    manager = Manager(device.journal)
    lent = lend(device, manager, rank=rank)
    by_phase = []
    for _ in range(3):
        device.journal.events.clear()
        phase(device, lent)
        by_phase.append(device.journal.calls(rank))
        device.train()
    return by_phase, manager.calls


@pytest.mark.shows("4.1", "4.21")
def test_the_manager_samples_between_the_stages_of_all_ranks() -> None:
    (first, calls), (second, no_calls) = run_ranks(2, _three_cycles)
    urls = ["engine 0", "engine 1"]
    assert calls == [(0, urls), (1, urls), (2, urls)]
    assert no_calls == []
    for of_rank in (first, second):
        for names in of_rank:
            assert names.index("continue_generation") < names.index("open")
            assert names.index("open") < names.index("close") < names.index("pause")
    for names in first:
        assert names.index("open") < names.index("sample") < names.index("close")


def _lose_one(rank: int) -> list[tuple[State, ...]]:
    device = recording_device(rank, sleep=True)
    manager = Manager(device.journal)
    lent = lend(device, manager, rank=rank)
    states, restarts = [], []
    for lost, dies in (((), None), ((1,), None), ((), None), ((0, 1), None), ((), 0), ((), None)):
        manager.lost = lost
        manager.dies = dies if rank == dies else None
        device.journal.events.clear()
        phase(device, lent)
        calls = device.journal.calls(rank)
        restarts.append("restart" in calls)
        assert ("drain" in calls) != ("restart" in calls)  # a lost one is asked nothing
        states.append(device.manager._life.states)
        device.train()
    assert restarts == [False, rank == 1, False, True, rank == 0, False]
    return states


@pytest.mark.shows("4.12")
def test_engines_that_the_manager_lost_restart_after_the_phase() -> None:
    first, second = run_ranks(2, _lose_one)
    assert first == second == [(State.ASLEEP, State.ASLEEP)] * 6


def _fail_to_sample(rank: int) -> list[str]:
    device = recording_device(rank, sleep=True)
    manager = Manager(device.journal)
    lent = lend(device, manager, rank=rank)
    endings = []
    for failure in (None, ServerDiedError("the manager is gone"), None):
        manager.failure = failure
        try:
            phase(device, lent)
        except EngineError as error:
            endings.append(str(error))
        else:
            endings.append("well")
        assert not lent._listener.is_open  # type: ignore[union-attr]
        device.train()
    return endings


def test_an_error_of_the_manager_is_raised_and_engines_sleep() -> None:
    first, second = run_ranks(2, _fail_to_sample)
    assert first == ["well", "the manager is gone", "well"]
    assert second == ["well"] * 3


class WatchingServers(RecordingServers):
    """Notes which weights the engine of the rank has when the others get theirs."""

    engine: RecordingEngine

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, bool]] = []

    def update(self, source: WeightSource, *, version: int) -> None:
        super().update(source, version=version)
        self.seen.append((self.engine.version, self.engine.is_admitting))


class Mixed:
    """A rank with an engine, beside servers with others."""

    def __init__(self) -> None:
        self.servers = WatchingServers()
        self.device = recording_device(servers=self.servers)
        assert self.device.engine is not None
        self.servers.engine = self.device.engine

    def cycle(self) -> None:
        assert self.device.serve()
        require_sent(self.servers, self.device.trainer)
        assert self.servers.version == self.device.version
        self.device.train()


@pytest.mark.shows("4.3")
def test_own_engines_get_each_steps_weights_after_the_fused_and_before_these_serve() -> None:
    mixed = Mixed()
    for _ in range(3):
        mixed.cycle()
    assert mixed.servers.seen == [(0, False), (1, False), (2, False)]
    assert [version for _, version in mixed.servers.updates] == [0, 1, 2]
    assert [folder.exists() for folder in mixed.servers.folders()] == [False, False, True]
    mixed.device.manager.shutdown()
    assert not any(folder.exists() for folder in mixed.servers.folders())


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([None, *ENGINE_CALLS, *TENANT_CALLS])),
        min_size=3,
        max_size=4,
    )
)
def test_no_fault_leaves_the_kinds_with_different_weights(
    faults: list[tuple[int, tuple[str, str] | None]],
) -> None:
    mixed = Mixed()
    for num_errors, call in faults:
        mixed.servers.errors = [
            StageError("sync", {0: "gone"}, of="engine") for _ in range(num_errors)
        ]
        if call is not None:
            target = TENANT if call in TENANT_CALLS else 0
            mixed.device.journal.fail(target, *call, when="before", times=1)
        with suppress(StageError):
            mixed.device.serve()
        mixed.servers.errors.clear()
        mixed.device.journal.faults.clear()
        mixed.cycle()
