from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import hybridrl
from hybridrl.errors import EngineError, PhaseError
from hybridrl.metrics import Sum
from hybridrl.workers.sharding.lifecycle import EDGES, Edge, SleepLevel, State
from hybridrl.workers.train.protocol import TrainState
from tests.workers.sharding.recording import (
    Event,
    Journal,
    RecordingEngine,
    Rig,
    managed_engine,
    recording_device,
)

DRAWING = Path(hybridrl.__file__).parents[1] / "docs" / "rollout-engines.md"
MAKE_ROOM = {"offload gradients": 2, "offload optimizer": 2}  # of two tenants
SYNC = ({"full_weights": 1, "load": 3 * 3}, {"finish_update": 3})  # three buckets, three engines
CONTINUE, STOP = {"continue_generation": 3}, ({"pause": 3}, {"drain": 3})
CACHE = {"kv_cache": 3, "cuda_graph": 3}
LEAVE, COME_BACK = {"offload parameters": 2}, {f"restore {part.value}": 2 for part in TrainState}
STAGES: dict[SleepLevel, Sequence[dict[str, int]]] = {
    SleepLevel.KEEP_ALL: (*SYNC, CONTINUE, *STOP),
    SleepLevel.RELEASE_CACHE: (
        *(MAKE_ROOM, *SYNC, LEAVE, {f"resume {part}": n for part, n in CACHE.items()}, CONTINUE),
        *(*STOP, {f"release {part}": n for part, n in CACHE.items()}, COME_BACK),
    ),
    SleepLevel.RELEASE_ALL: (
        *(MAKE_ROOM, {"resume weights": 3}, *SYNC, LEAVE),
        *({f"resume {part}": n for part, n in CACHE.items()}, CONTINUE, *STOP),
        *({f"release {part}": n for part, n in {**CACHE, "weights": 3}.items()}, COME_BACK),
    ),
}
"""What a cycle asks in each stage, and how often; each stage begins when the last has ended."""


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


def _check_stages(rig: Rig, stages: Sequence[dict[str, int]]) -> None:
    calls = rig.journal.calls()
    for stage in stages:
        now, calls = calls[: sum(stage.values())], calls[sum(stage.values()) :]
        assert Counter(now) == stage
    assert calls == []


@pytest.mark.shows("1.15", "2.1", "2.2", "2.3", "2.5", "2.14", "3.1", "3.7", "3.9", "5.4", "5.6")
@pytest.mark.parametrize("depth", SleepLevel)
def test_a_cycle_asks_each_engine_once_and_stage_by_stage(depth: SleepLevel) -> None:
    rig = Rig(num_engines=3, depth=depth)
    rig.cycle()
    for _ in range(3):
        rig.journal.events.clear()
        rig.life.wake()
        rig.check_serving()
        rig.life.sleep()
        _check_stages(rig, STAGES[depth])
        rig.train()
    resting = {
        SleepLevel.KEEP_ALL: State.DRAINED,
        SleepLevel.RELEASE_CACHE: State.KV_ASLEEP,
        SleepLevel.RELEASE_ALL: State.ASLEEP,
    }
    assert set(rig.life.states) == {resting[depth]}


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


@pytest.mark.shows("3.2")
def test_the_allocators_cache_is_emptied_before_every_resume() -> None:
    rig = Rig()
    emptied = Event(-2, "empty_cache")
    for managed in rig.set.engines:
        managed.memory.empty_cache = lambda: rig.journal.events.append(emptied)  # type: ignore[method-assign]
    for _ in range(2):
        rig.journal.events.clear()
        rig.cycle()
        calls = rig.journal.calls()
        resumes = [place for place, call in enumerate(calls) if call.startswith("resume")]
        assert len(resumes) == 2 * 3
        assert all(calls[place - 1] == "empty_cache" for place in resumes)


class BusyEngine(RecordingEngine):
    def drain(self, *, timeout_s: float) -> int:
        return 2


@pytest.mark.shows("2.9")
def test_aborted_requests_are_counted() -> None:
    managed = managed_engine(BusyEngine(0, Journal()))
    for _ in range(2):
        managed.drain()
        managed.drain()
        assert managed.take_metrics() == {"rollout/aborted_requests": Sum(4)}


@pytest.mark.shows("3.14")
@pytest.mark.parametrize("sleep", [True, False])
def test_saving_between_two_phases_moves_no_engine(sleep: bool) -> None:
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
        assert device.trainer.asked == {torch.float32, None}  # the type of the engines, and ours
