"""The order of stages: who is asked what, when, and when not."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import hybridrl
from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Sum
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.lifecycle import EDGES, Edge, SleepLevel, State
from hybridrl.workers.sharding.memory import DeviceMemory
from hybridrl.workers.train.protocol import TrainState
from tests.workers.sharding.recording import (
    CPU,
    Event,
    Journal,
    RecordingEngine,
    Rig,
    managed_engine,
    recording_device,
)

DRAWING = Path(hybridrl.__file__).parents[1] / "docs" / "rollout-engines.md"
SLEEP = ["pause", "drain", "release kv_cache", "release cuda_graph", "release weights"]
WAKE = ["resume weights", "load", "finish_update", "resume kv_cache"]
WAKE += ["resume cuda_graph", "continue_generation"]


def _check_order(rig: Rig, *steps: str) -> None:
    """Each step ends at all engines before the next begins at any."""
    calls = rig.journal.calls()
    for earlier, later in pairwise(steps):
        last_of_earlier = len(calls) - 1 - calls[::-1].index(earlier)
        assert last_of_earlier < calls.index(later), f"{later} began before all had done {earlier}"


def test_the_edges_are_those_that_the_page_draws() -> None:
    drawn = set()
    for line in DRAWING.read_text(encoding="utf-8").splitlines():
        chain = line.split("   ")[0]
        if "->" in chain and set(re.findall("[A-Za-z_]+", chain)) <= {*State.__members__, "any"}:
            nodes = [re.findall("[A-Za-z_]+", node) for node in re.split("-+>", chain)]
            for sources, (target,) in pairwise(nodes):
                every = list(State.__members__) if sources == ["any"] else sources
                drawn |= {(source, target) for source in every}
    assert drawn == {(source.name, edge.target.name) for edge in EDGES for source in edge.sources}


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_an_edge_is_taken_from_its_sources_and_refused_elsewhere(state: State, edge: Edge) -> None:
    rig = Rig()
    rig.life._states = [state, state]
    if state in edge.sources:
        rig.life._transition(edge, lambda _: None, members=[1])
        assert rig.life.states == (state, edge.target)
        return
    legal = ", ".join(e.name for e in EDGES if state in e.sources)
    with pytest.raises(PhaseError) as raised:
        rig.life._transition(edge, lambda _: None, members=[1])
    assert str(raised.value) == (
        f"engine 1 is {state.name}: {edge.name} is not legal there; legal are {legal}"
    )
    assert rig.life.states == (state, state)


@pytest.mark.shows("2.1", "2.2", "2.5")
def test_all_engines_finish_a_stage_before_any_starts_the_next() -> None:
    rig = Rig(num_engines=3)
    for _ in range(3):
        rig.journal.events.clear()
        rig.cycle()
        _check_order(rig, "pause", "drain", "release kv_cache")
        _check_order(rig, "resume weights", "load", "finish_update", "resume kv_cache")
        _check_order(rig, "resume cuda_graph", "continue_generation")


@pytest.mark.shows("3.1", "5.4")
def test_training_state_leaves_in_two_steps_around_the_sync() -> None:
    rig = Rig()
    for _ in range(2):
        rig.journal.events.clear()
        rig.life.wake()
        for call in ("offload optimizer", "offload gradients"):
            _check_order(rig, call, "resume weights")
        _check_order(rig, "finish_update", "offload parameters", "resume kv_cache")
        rig.journal.events.clear()
        rig.life.sleep()
        for part in TrainState:
            _check_order(rig, "release weights", f"restore {part.value}")


@pytest.mark.shows("3.1", "5.6")
def test_each_engine_is_asked_exactly_once_per_cycle() -> None:
    rig = Rig()
    rig.life.wake()
    for _ in range(2):
        rig.life.sleep()
        rig.train()
        rig.journal.events.clear()
        rig.life.wake()
        rig.life.sleep()
        for engine in (0, 1):
            calls = rig.journal.calls(engine)
            num_buckets = calls.count("load")
            assert num_buckets == 3
            del calls[1:num_buckets]
            assert calls == WAKE + SLEEP


@pytest.mark.shows("2.13")
def test_sleeping_or_waking_twice_is_a_no_op() -> None:
    rig = Rig()
    for _ in range(2):
        rig.life.wake()
        num_events = len(rig.journal.events)
        rig.life.wake()
        assert len(rig.journal.events) == num_events
        rig.check_serving()
        rig.life.sleep()
        num_events = len(rig.journal.events)
        rig.life.sleep()
        assert len(rig.journal.events) == num_events
        rig.check_training()


@pytest.mark.shows("3.7")
@pytest.mark.parametrize("num_engines", [1, 2, 8])
@pytest.mark.parametrize("depth", SleepLevel)
def test_engines_serve_the_newest_weights_in_every_cycle(
    depth: SleepLevel, num_engines: int
) -> None:
    rig = Rig(num_engines, depth=depth)
    for _ in range(3):
        rig.cycle()


@pytest.mark.shows("2.3", "2.14", "3.9")
def test_without_sleep_weights_are_updated_in_order_and_only_if_new() -> None:
    rig = Rig(num_engines=3, depth=SleepLevel.KEEP_ALL)
    rig.cycle()
    for is_trained in (False, True, True):
        rig.life.wake()
        rig.journal.events.clear()
        rig.life.sleep()
        rig.check_training()
        assert set(rig.life.states) == {State.DRAINED}
        if is_trained:
            rig.train()
        rig.life.wake()
        rig.check_serving()
        steps = ["pause", "drain", "load", "finish_update", "continue_generation"]
        if not is_trained:
            steps = ["pause", "drain", "continue_generation"]
        assert set(rig.journal.calls()) == {*steps, *(["full_weights"] if is_trained else [])}
        _check_order(rig, *steps)


@pytest.mark.shows("1.15")
def test_with_cache_sleep_only_cache_and_graphs_are_released() -> None:
    rig = Rig(depth=SleepLevel.RELEASE_CACHE)
    rig.cycle()
    for _ in range(2):
        rig.journal.events.clear()
        rig.cycle()
        calls = rig.journal.calls(0)
        for part, times in zip(MemoryTag, (0, 1, 1), strict=True):
            assert calls.count(f"release {part.value}") == times
            assert calls.count(f"resume {part.value}") == times
        assert rig.life.states == (State.KV_ASLEEP, State.KV_ASLEEP)


@pytest.mark.shows("3.3")
def test_the_cache_does_not_wake_beside_a_tenant_that_will_not_leave() -> None:
    rig = Rig()
    stubborn = rig.reference
    real_offload = stubborn.offload
    stubborn.offload = lambda part: None  # type: ignore[method-assign]
    for _ in range(2):
        failed = r"offload_parameters failed on rank 0: PhaseError: .*reference"
        with pytest.raises(EngineError, match=failed):
            rig.life.wake()
        rig.check_training()
    assert "resume kv_cache" not in rig.journal.calls()
    stubborn.offload = real_offload  # type: ignore[method-assign]
    rig.cycle()


def test_waking_half_way_is_refused() -> None:
    rig = Rig()
    rig.life._states = [State.READY, State.ASLEEP]
    with pytest.raises(PhaseError, match=r"0: READY, 1: ASLEEP; training state is in; sleep first"):
        rig.life.wake()


class EmptiedMemory(DeviceMemory):
    """A device whose cache is emptied in the journal."""

    journal: Journal

    def empty_cache(self) -> None:
        self.journal.events.append(Event(-2, "empty_cache"))


@pytest.mark.shows("3.2")
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


@pytest.mark.shows("2.9")
def test_aborted_requests_are_counted() -> None:
    managed = managed_engine(BusyEngine(0, Journal()))
    for _ in range(2):
        managed.drain()
        managed.drain()
        assert managed.take_metrics() == {"rollout/aborted_requests": Sum(4)}


def test_weights_are_asked_for_in_the_type_of_the_engines() -> None:
    device = recording_device(sleep=True)
    device.serve()
    assert device.trainer.asked == {torch.float32}


@pytest.mark.shows("3.14")
@pytest.mark.parametrize("sleep", [True, False])
def test_saving_between_two_phases_moves_no_engine(sleep: bool) -> None:
    """A checkpoint needs training alone: engines are at rest already, and get no weights."""
    device = recording_device(sleep=sleep)
    for _ in range(2):
        device.serve()
        device.journal.events.clear()
        device.manager.require_training()
        dict(device.trainer.full_weights())
        assert device.journal.calls() == ["full_weights"]
        device.serve()
        num_streams = device.journal.calls().count("full_weights") - 1
        assert num_streams == (1 if sleep else 0)  # without sleep nothing was lost or changed
