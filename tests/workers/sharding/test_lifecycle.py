from __future__ import annotations

from itertools import pairwise

import pytest

from hybridrl.errors import EngineError, PhaseError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.lifecycle import SleepLevel
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.states import EDGES, Edge, State
from hybridrl.workers.train.protocol import TrainState
from tests.workers.sharding.recording import Rig
from tests.workers.sharding.watched import DRAWN


def _sources(edge: Edge) -> list[State]:
    return [State[name] for name in DRAWN[edge.name].partition(" -> ")[0].split()]


def _do_nothing(managed: ManagedEngine) -> None:
    pass


def test_the_edges_are_those_of_the_picture() -> None:
    assert [edge.name for edge in EDGES] == list(DRAWN)
    assert all(edge.target.name == DRAWN[edge.name].partition(" -> ")[2] for edge in EDGES)


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.name)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_an_edge_is_taken_where_it_is_drawn_and_refused_elsewhere(state: State, edge: Edge) -> None:
    rig = Rig()
    rig.life._states = [state, state]
    if state in _sources(edge):
        rig.life._transition(edge, _do_nothing, members=[1])
        assert rig.life.states == (state, edge.target)
        return
    legal = [e.name for e in EDGES if state in _sources(e)]
    expected = f"engine 1 is {state.name}: {edge.name} is not legal there; legal are "
    with pytest.raises(PhaseError) as raised:
        rig.life._transition(edge, _do_nothing, members=[1])
    assert str(raised.value) == expected + ", ".join(legal)
    assert rig.life.states == (state, state)


def test_a_single_edge_is_not_idempotent() -> None:
    rig = Rig()
    rig.life.wake()
    rig.life._transition(EDGES[1], ManagedEngine.pause, members=[0, 1])
    with pytest.raises(PhaseError, match="engine 0 is PAUSED: pause is not legal there"):
        rig.life._transition(EDGES[1], ManagedEngine.pause, members=[0, 1])


SLEEP = ["pause", "drain", "release kv_cache", "release cuda_graph", "release weights"]
WAKE = ["resume weights", "update_weights", "finish_update", "resume kv_cache"]
WAKE += ["resume cuda_graph", "continue_generation"]


def test_every_engine_finishes_a_stage_before_any_starts_the_next_in_each_of_three_cycles() -> None:
    rig = Rig(num_engines=3)
    for _ in range(3):
        rig.journal.events.clear()
        rig.cycle()
        for earlier, later in pairwise(["pause", "drain", "release kv_cache"]):
            _check_order(rig, earlier, later)
        for earlier, later in pairwise(["resume weights", "update_weights", "finish_update"]):
            _check_order(rig, earlier, later)
        _check_order(rig, "finish_update", "resume kv_cache")
        _check_order(rig, "resume cuda_graph", "continue_generation")


def test_training_state_leaves_in_two_steps_around_the_sync() -> None:
    rig = Rig()
    for _ in range(2):
        rig.journal.events.clear()
        rig.life.wake()
        for call in ("offload optimizer", "offload gradients"):
            _check_order(rig, call, "resume weights")
        _check_order(rig, "finish_update", "offload parameters")
        _check_order(rig, "offload parameters", "resume kv_cache")
        rig.journal.events.clear()
        rig.life.sleep()
        for part in TrainState:
            _check_order(rig, "release weights", f"restore {part.value}")


def _check_order(rig: Rig, earlier: str, later: str) -> None:
    calls = rig.journal.calls()
    last_of_earlier = len(calls) - 1 - calls[::-1].index(earlier)
    assert last_of_earlier < calls.index(later), f"{later} began before all had done {earlier}"


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
            num_buckets = calls.count("update_weights")
            assert num_buckets == 3
            del calls[1:num_buckets]
            assert calls == WAKE + SLEEP


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


def test_engines_start_asleep_and_admit_nothing() -> None:
    rig = Rig()
    assert rig.life.states == (State.ASLEEP, State.ASLEEP)
    for engine in rig.engines:
        assert not engine.is_admitting
        assert not any(engine.resident_bytes(part) for part in MemoryTag)
        with pytest.raises(EngineError, match="paused"):
            engine.serve()


@pytest.mark.parametrize("num_engines", [1, 2, 8])
@pytest.mark.parametrize("depth", SleepLevel)
def test_engines_serve_the_newest_weights_in_every_cycle(
    depth: SleepLevel, num_engines: int
) -> None:
    rig = Rig(num_engines, depth=depth)
    for _ in range(3):
        rig.cycle()


def test_without_sleep_nothing_is_released_and_only_new_weights_are_sent() -> None:
    rig = Rig(depth=SleepLevel.KEEP_ALL)
    num_sent = []
    for is_trained in (True, False, True):
        rig.journal.events.clear()
        rig.life.wake()
        rig.check_serving()
        rig.life.sleep()
        rig.check_training()
        num_sent.append(rig.journal.calls(0).count("update_weights"))
        untouched = ("release", "resume", "offload", "restore")
        assert not [call for call in rig.journal.calls() if call.startswith(untouched)]
        assert rig.life.states == (State.DRAINED, State.DRAINED)
        if is_trained:
            rig.train()
    assert num_sent == [3, 3, 0]


def test_with_cache_sleep_weights_stay_and_only_cache_and_graphs_go() -> None:
    rig = Rig(depth=SleepLevel.RELEASE_CACHE)
    rig.cycle()
    for _ in range(2):
        rig.journal.events.clear()
        rig.cycle()
        assert "release weights" not in rig.journal.calls()
        assert "resume weights" not in rig.journal.calls()
        assert rig.journal.calls(0).count("release kv_cache") == 1
        assert rig.life.states == (State.KV_ASLEEP, State.KV_ASLEEP)


def test_only_released_parts_are_resumed() -> None:
    rig = Rig(depth=SleepLevel.RELEASE_CACHE)
    rig.cycle()
    rig.journal.events.clear()
    rig.cycle()
    calls = rig.journal.calls(1)
    for part in MemoryTag:
        assert calls.count(f"resume {part.value}") == calls.count(f"release {part.value}")


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
