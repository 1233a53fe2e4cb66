from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

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

from hybridrl.config.serving import WorkerType
from hybridrl.metrics import Sum
from hybridrl.serving.plan import ModelPlan, plan_own_engines
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from tests.config.values import config_of
from tests.serving.engines import RecordingHandle, ServerRig, plan_of
from tests.workers.sharding.recording import WEIGHTS, Policy
from tests.workers.sharding.watched import CALLS


class Rig(ServerRig[RecordingHandle]):
    def __init__(self, plan: ModelPlan, **settings: Any) -> None:
        super().__init__(RecordingHandle, plan, **settings)
        self.silent: set[int] = set()
        """Engines whose next process never answers."""
        self.load_s = 0.0
        """Seconds that a process takes to load a bucket."""
        self.stages: list[tuple[str, int, int]] = []
        """Name, and the events of the journal that fell into it."""
        self.server._life._observe = self._observe

    def prepare(self, handle: RecordingHandle) -> None:
        handle.is_silent = handle.index in self.silent
        handle.engine.load_s = self.load_s

    @contextmanager
    def _observe(self, stage: str) -> Iterator[None]:
        begin = len(self.journal.events)
        try:
            yield
        finally:
            self.stages.append((stage, begin, len(self.journal.events)))

    def recover(self) -> dict[int, bool]:
        """Replace the lost engines one after another; say which serve now."""
        reasons = {i: self.server.replace(i) for i in self.server.claim_lost()}
        for index, reason in reasons.items():
            if reason:
                self.server.give_up(index)
        return {index: not reason for index, reason in reasons.items()}

    def check_stages(self) -> None:
        """Engines are asked in a stage what belongs to it; between stages processes start."""
        for (_, _, end), (_, begin, _) in pairwise(self.stages):
            assert {event.call for event in self.journal.events[end:begin]} <= {"restart"}
        for stage, begin, end in self.stages:
            asked = self.journal.events[begin:end]
            calls = {f"{event.call} {event.part}".strip() for event in asked}
            assert calls <= CALLS[stage], stage
        assert not [event for event in self.journal.events if event.call in ("release", "resume")]

    def check_served(self, version: int) -> None:
        assert set(self.server.states) == {State.READY}
        for index in self.server.serving_engines():
            answer = self.newest[index].engine.serve()
            for name in WEIGHTS:
                assert answer[name].tolist() == Policy.WHOLE.truth(name, version), (index, name)


def started(plan: ModelPlan) -> Rig:
    rig = Rig(plan)
    rig.server.start()
    rig.update(0)
    return rig


def names_since(rig: Rig, first: int) -> list[str]:
    return [stage for stage, _, _ in rig.stages[first:]]


# -- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_silent", "error"),
    [(False, "InjectedFault"), (True, "DeadlineError: no answer within 0.05 s")],
)
@pytest.mark.shows("4.6")
def test_an_engine_that_does_not_start_is_named_and_a_second_start_starts_no_other(
    error: str, *, is_silent: bool
) -> None:
    rig = Rig(plan_of(("regular", 3)), **({"start_timeout_s": 0.05} if is_silent else {}))
    if is_silent:
        rig.silent = {1}
    else:
        rig.journal.fail(1, "restart")
    with pytest.raises(StageError, match=f"start failed on engine 1: {error}"):
        rig.server.start()
    rig.silent = set()
    for _ in range(2):
        rig.server.start()
        assert [handle.index for handle in rig.launched] == [0, 1, 2, 1]


@pytest.mark.shows("4.6")
def test_encoders_have_started_before_engines_that_ask_them_begin() -> None:
    rig = Rig(plan_of(("regular", 1), ("encoder", 2), ("regular", 1)))
    rig.journal.fail(1, "restart")
    with pytest.raises(StageError, match="start failed on engine 1"):
        rig.server.start()
    assert [handle.index for handle in rig.launched] == [1, 2, 0, 3]
    ends = [event.engine for event in rig.journal.events if event.call == "restart"]
    assert set(ends[:2]) <= {1, 2}
    rig.server.start()
    rig.update(0)
    assert set(rig.server.ready_engines()) == {0, 1, 2, 3}
    assert set(rig.server.serving_engines()) == {0, 3}


# -- order --------------------------------------------------------------------------------------


@pytest.mark.shows("2.5", "2.13", "2.14")
def test_an_update_pauses_drains_loads_and_continues_all_groups_once() -> None:
    rig = started(plan_of(("regular", 2), ("placeholder", 5), ("regular", 1)))
    first = len(rig.stages)
    rig.update(1)
    stages = ["pause", "drain", "sync", "resume_cache", "continue"]
    assert names_since(rig, first) == stages
    rig.check_stages()
    rig.check_served(1)
    assert {event.engine for event in rig.journal.events} == {0, 1, 2}
    begin = len(rig.journal.events)
    rig.update(1)
    assert len(rig.journal.events) == begin


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.shows("2.7")
@pytest.mark.parametrize("call", ["pause", "drain"])
def test_if_an_engine_of_a_group_does_not_stop_all_serve_again(call: str) -> None:
    rig = started(plan_of(("regular", 2), ("regular", 2)))
    rig.journal.fail(2, call)
    with pytest.raises(StageError, match=f"{call} failed on engine 2: InjectedFault"):
        rig.update(1)
    rig.check_served(0)
    rig.check_stages()


@pytest.mark.shows("1.16", "2.6", "4.12")
def test_dead_engines_alone_are_replaced_and_get_the_weights() -> None:
    rig = started(plan_of(("regular", 2), ("regular", 2)))
    rig.newest[0].kill()
    rig.newest[3].kill()
    assert set(rig.server.serving_engines()) == {0, 1, 2, 3}  # nobody has looked yet
    rig.update(0)  # the same weights
    assert [handle.index for handle in rig.launched[4:]] == [0, 3]
    rig.check_served(0)
    rig.newest[1].kill()
    first = len(rig.stages)
    rig.update(1)
    assert names_since(rig, first)[:4] == ["restart", "start", "pause", "drain"]  # others serve
    rig.check_stages()


def test_after_an_update_that_failed_no_engine_counts_as_one_of_the_old_weights() -> None:
    rig = started(plan_of(("regular", 2)))
    rig.journal.fail(1, "load")
    with pytest.raises(StageError, match="sync failed on engine 1"):
        rig.update(1)
    assert rig.server.version != 0  # engine 0 has the new weights
    assert rig.server.claim_lost() == []  # there are no weights that all have
    rig.update(0)
    rig.check_served(0)


@pytest.mark.shows("4.12", "4.15")
def test_within_a_phase_a_lost_engine_is_replaced_and_others_asked_nothing() -> None:
    rig = started(plan_of(("regular", 2), ("regular", 2)))
    rig.update(5)
    rig.newest[0].kill()
    rig.newest[3].kill()
    first, begin = len(rig.stages), len(rig.journal.events)
    assert rig.recover() == {0: True, 3: True}
    stages = ["restart", "start", "resume_weights", "sync", "resume_cache", "continue"]
    assert names_since(rig, first) == stages * 2
    assert {event.engine for event in rig.journal.events[begin:]} == {0, 3}
    rig.check_served(5)
    counts = rig.server.take_metrics()
    assert counts["rollout/lost_engines"] == counts["rollout/replaced_engines"] == Sum(2)


@pytest.mark.shows("4.13")
def test_nothing_is_replaced_before_the_first_weights() -> None:
    rig = Rig(plan_of(("regular", 2)))
    rig.server.start()
    rig.newest[0].kill()
    assert rig.server.claim_lost() == []
    assert len(rig.launched) == 2
    rig.update(0)
    rig.check_served(0)


@pytest.mark.parametrize("call", ["restart", "finish_update", "load", "continue_generation"])
def test_a_replacement_that_fails_is_replaced_itself(call: str) -> None:
    rig = started(plan_of(("regular", 2)))
    rig.newest[1].kill()
    rig.journal.fail(1, call)
    assert rig.recover() == {1: False}
    assert rig.server.states == (State.READY, State.BROKEN)
    assert rig.recover() == {1: True}
    rig.check_served(0)


# -- servers that others run ---------------------------------------------------------------------


def elsewhere_plan(num_servers: int) -> ModelPlan:
    urls = ", ".join(f"'http://h{number}:1'" for number in range(num_servers))
    (plan,) = plan_own_engines(
        config_of(
            *("rollout=sglang", "serving.num_devices_per_node=0"),
            f"serving.models={{policy: {{urls: [{urls}]}}}}",
        )
    )
    return plan


@pytest.mark.shows("4.23")
def test_an_update_goes_on_without_a_lost_server_of_others() -> None:
    rig = started(elsewhere_plan(3))
    rig.newest[1].kill()
    first = len(rig.stages)
    for version in (1, 2):
        rig.update(version)
        assert rig.server.states == (State.READY, State.BROKEN, State.READY)
        assert set(rig.server.serving_engines()) == {0, 2}
        assert rig.server.version == version
        assert rig.newest[2].loads[-1][1] == version
    assert "restart" not in names_since(rig, first)  # the others do not wait for it
    assert len(rig.launched) == 3
    counts = rig.server.take_metrics()
    assert counts == {"rollout/lost_engines": Sum(1), "rollout/replaced_engines": Sum(0)}
    assert rig.recover() == {1: True}
    rig.check_served(2)
    rig.check_stages()
    rig.update(3)
    rig.check_served(3)


@pytest.mark.parametrize("call", ["drain", "load", "finish_update", "continue_generation"])
def test_a_server_of_others_lost_in_an_update_is_left_out_of_the_next(call: str) -> None:
    rig = started(elsewhere_plan(2))
    rig.journal.fail(1, call)
    if call == "drain":
        rig.journal.fail(1, "continue_generation")  # it is gone, and not only busy
    with pytest.raises(StageError, match="engine 1: InjectedFault"):
        rig.update(1)
    rig.update(1)
    assert rig.server.states == (State.READY, State.BROKEN)
    assert rig.server.claim_lost() == [1]
    assert rig.server.take_metrics()["rollout/lost_engines"] == Sum(1)  # before it is back
    assert rig.server.replace(1) == ""
    counts = rig.server.take_metrics()
    assert counts["rollout/lost_engines"] == Sum(0)
    assert counts["rollout/replaced_engines"] == Sum(1)
    rig.check_served(1)
    rig.check_stages()


def test_at_the_start_all_servers_of_others_must_be_there_and_later_any_is_enough() -> None:
    rig = Rig(elsewhere_plan(2))
    rig.journal.fail(1, "restart")
    with pytest.raises(StageError, match="start failed on engine 1"):
        rig.server.start()
    rig = started(elsewhere_plan(2))
    for index in (0, 1):
        rig.newest[index].kill()
        rig.journal.fail(index, "restart")
    with pytest.raises(StageError, match=r"restart failed on engine 0: .*; engine 1: "):
        rig.update(1)
    rig.journal.fail(0, "restart")
    rig.update(1)
    assert rig.server.states == (State.BROKEN, State.READY)
    assert rig.recover() == {0: True}
    rig.check_served(1)


def test_a_load_from_files_may_take_as_long_as_a_start() -> None:
    rig = Rig(plan_of(("regular", 2)), stage_timeout_s=0.2)
    rig.load_s = 0.5
    rig.server.start()
    rig.update(1)
    rig.newest[0].kill()
    assert rig.recover() == {0: True}
    assert rig.server.states == (State.READY,) * 2


# -- whatever happens ---------------------------------------------------------------------------

CALLED = ["pause", "drain", "release", "resume", "load", "finish_update", "continue_generation"]
SHOTS = st.lists(
    st.tuples(
        st.sampled_from([*CALLED, "restart"]),
        st.integers(0, 7),
        st.sampled_from(["before", "after"]),
        st.integers(0, 2),
    ),
    max_size=3,
)
PARTS = {"release": "weights", "resume": "kv_cache"}


class RandomFaults(RuleBasedStateMachine):
    """Whatever fails or dies, no engine serves other weights, and one try without faults heals."""

    rig: Rig

    @initialize(
        groups=st.lists(
            st.tuples(st.sampled_from(["regular", "placeholder"]), st.integers(1, 3)), max_size=3
        )
    )
    def boot(self, groups: list[tuple[WorkerType, int]]) -> None:
        self.version = 0
        self.rig = started(plan_of(("regular", 1), *groups))

    @rule(shots=SHOTS, is_new=st.booleans())
    def update(self, shots: list[tuple[str, int, str, int]], *, is_new: bool) -> None:
        self._fire(shots)
        self.version += is_new
        try:
            self.rig.update(self.version)
        except StageError:
            return
        self.rig.check_served(self.version)

    @rule(victim=st.integers(0, 7))
    def kill(self, victim: int) -> None:
        self.rig.newest[victim % len(self.rig.newest)].kill()

    @rule(shots=SHOTS)
    def recover(self, shots: list[tuple[str, int, str, int]]) -> None:
        """Within a phase: engines that serve are asked nothing."""
        self._fire(shots)
        healthy = {
            index
            for index in self.rig.server.serving_engines()
            if self.rig.newest[index].is_alive()
        }
        begin = len(self.rig.journal.events)
        self.rig.recover()
        assert not {event.engine for event in self.rig.journal.events[begin:]} & healthy
        assert healthy <= set(self.rig.server.serving_engines())
        version = self.rig.server.version
        for index in self.rig.server.serving_engines() if version >= 0 else ():
            answer = self.rig.newest[index].engine.serve()
            for name in WEIGHTS:
                assert answer[name].tolist() == Policy.WHOLE.truth(name, version)

    @rule()
    def cease_fire(self) -> None:
        self.rig.journal.faults.clear()
        self.rig.update(self.version)
        self.rig.check_served(self.version)

    @invariant()
    def engines_are_asked_in_order(self) -> None:
        self.rig.check_stages()

    @invariant()
    def one_process_a_slot_lives(self) -> None:
        alive = [handle for handle in self.rig.launched if handle.is_alive()]
        assert len({handle.index for handle in alive}) == len(alive)

    def teardown(self) -> None:
        self.cease_fire()
        self.rig.server.shutdown()
        assert not any(handle.is_alive() for handle in self.rig.launched)

    def _fire(self, shots: list[tuple[str, int, str, int]]) -> None:
        for call, victim, when, skip in shots:
            index = victim % len(self.rig.newest)
            self.rig.journal.fail(index, call, PARTS.get(call, ""), when=when, skip=skip)


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.shows("2.16", "4.12")
def test_random_faults_leave_no_server_with_other_weights() -> None:
    run_state_machine_as_test(
        RandomFaults,
        settings=settings(
            max_examples=40,
            stateful_step_count=12,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
