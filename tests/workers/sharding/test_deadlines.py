from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridrl.errors import ConfigError, ConfigErrors, DeadlineError, EngineError, PhaseError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import ControlGroup, Limit, StageError
from hybridrl.workers.sharding.fused_engines import start_engine
from hybridrl.workers.sharding.lifecycle import State
from tests.ranks import run_ranks
from tests.workers.sharding.managers import sharding_manager
from tests.workers.sharding.recording import (
    WEIGHTS,
    Journal,
    RecordingEngine,
    RecordingTrainEngine,
    recording_device,
    rollout_config,
)


def _act_in_stages(rank: int) -> list[object]:
    control = ControlGroup(timeout_s=20.0)

    def act() -> int:
        if rank == 1:
            raise ValueError("engine said 503")
        return rank

    with pytest.raises(StageError) as raised:
        control.everywhere("wake", act)
    agreed = (
        control.everywhere("wake", lambda: rank * 10),
        control.is_true_anywhere("none", flag=False),
        control.is_true_anywhere("one", flag=rank == 2),
        control.largest("value", rank * 2**40),
        -control.largest("smallest", -(rank + 5)),
    )
    with pytest.raises(PhaseError) as apart:
        control.exchange("pause" if rank else "drain", None)
    return [str(raised.value), repr(raised.value.__cause__), agreed, str(apart.value)]


def test_ranks_agree_on_values_and_hear_of_errors_and_of_other_ways() -> None:
    for rank, (error, cause, agreed, apart) in enumerate(run_ranks(3, _act_in_stages)):
        assert error == "wake failed on rank 1: ValueError: engine said 503"
        assert cause == ("ValueError('engine said 503')" if rank == 1 else "None")
        assert agreed == (rank * 10, False, True, 2 * 2**40, 5)
        assert apart == (
            f"rank {rank} is at stage {'pause' if rank else 'drain'!r} and another rank is not; "
            "all 3 ranks must enter and leave a rollout phase together"
        )


def _one_rank_samples_longer_than_a_stage_may_take(rank: int, late: int) -> str:
    control = ControlGroup(timeout_s=1.0)
    if rank == late:
        time.sleep(3.0)
    control.meet("generate", Limit(30.0, "cluster.call_timeout_s"))
    control.exchange("pause", None)
    if rank == late:
        dist.barrier()  # of the other group: this rank does not come
        return ""
    with pytest.raises(DeadlineError) as raised:
        control.meet("generate", Limit(1.0, "cluster.call_timeout_s"))
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_differ_in_sampling_but_not_for_ever(late: int) -> None:
    texts = run_ranks(2, _one_rank_samples_longer_than_a_stage_may_take, late)
    assert texts[1 - late] == (
        "generate: not all 2 ranks answered within 1 s; a rank died or is stuck. "
        "If the stage is only slow, raise cluster.call_timeout_s"
    )


def test_the_stage_error_survives_the_way_to_the_driver() -> None:
    error = StageError("sync", {3: "LedgerError: lost", 1: "OSError: gone"}, of="engine")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, StageError)
    assert isinstance(copy, EngineError)
    assert str(copy) == "sync failed on engine 1: OSError: gone; engine 3: LedgerError: lost"
    assert (copy.stage, copy.failures) == (error.stage, error.failures)


STAGE_S, LATE_S = 1.5, 4.0


class SlowEngine(RecordingEngine):
    """Boots more slowly than a stage may take, and once keeps what it says it has released.

    Or gives it back later than it says, each part within the time of a stage, all beyond it.
    """

    keeps: MemoryTag | None = None
    is_crawling = False
    _gone_at = 0.0

    def resident_bytes(self, part: MemoryTag) -> int:
        return 1 if time.monotonic() < self._gone_at else super().resident_bytes(part)

    def release(self, part: MemoryTag, *, backup: frozenset[str] = frozenset()) -> None:
        if part is self.keeps:
            self.keeps = None
            return
        super().release(part, backup=backup)
        if self.is_crawling:
            self._gone_at = time.monotonic() + 0.8 * STAGE_S

    def restart(self) -> None:
        self.is_crawling, self._gone_at = False, 0.0
        time.sleep(LATE_S)
        super().restart()


def _late_engine() -> SlowEngine:
    time.sleep(LATE_S)
    return SlowEngine(0, Journal())


def _two_ranks_of_an_engine_that_starts_late(rank: int) -> bool:
    config = rollout_config(tensor_parallel_size=2)
    control = ControlGroup(timeout_s=STAGE_S)

    def build() -> SlowEngine:
        assert range(2) in control._subgroups  # made while no rank was late
        return _late_engine()

    engine = start_engine(
        build if rank == 0 else None, ranks=range(2), config=config, control=control
    )
    assert (engine is None) == (rank == 1)
    assert engine is None or isinstance(engine, SlowEngine)
    manager = sharding_manager(engine, config=config, control=control)
    manager.attach_policy(RecordingTrainEngine(Journal()).as_policy())
    with manager.rollout_phase():
        served = {} if engine is None else engine.serve()
    return all(served[name].tolist() == [size] * size for name, size in WEIGHTS.items() if served)


def test_ranks_wait_for_an_engine_that_starts_later_than_a_stage() -> None:
    assert run_ranks(2, _two_ranks_of_an_engine_that_starts_late) == [True, True]


class SlowReader(RecordingEngine):
    """Loads files more slowly than a stage may take: those of a comparison, or of a sync."""

    def load_reference_weights(self, folder: Path) -> None:
        assert list(folder.iterdir())
        time.sleep(LATE_S)

    def verify_weights(self) -> None:
        pass

    def finish_update(self, *, version: int) -> None:
        time.sleep(LATE_S if self.is_disk else 0.0)
        super().finish_update(version=version)

    is_disk = False


def _two_ranks_of_an_engine_that_loads_files(rank: int, transport: str) -> bool:
    keys: dict[str, Any] = {"tensor_parallel_size": 2, "transport": transport}
    keys["verify_weights"] = "never" if transport == "disk" else "first"
    device = recording_device(rank, kind=SlowReader, timeout_s=STAGE_S, **keys)
    if device.engine is not None:
        device.engine.is_disk = transport == "disk"  # type: ignore[attr-defined]
    begin = time.monotonic()
    return device.serve() and time.monotonic() - begin > LATE_S


@pytest.mark.parametrize("transport", ["auto", "disk"])
def test_a_load_from_files_may_take_as_long_as_a_start(transport: str) -> None:
    assert run_ranks(2, _two_ranks_of_an_engine_that_loads_files, transport) == [True] * 2


def _one_engine_samples_longer_than_another(rank: int) -> str:
    device = recording_device(rank, call_timeout_s=0.5)
    begin = time.monotonic()
    with pytest.raises(DeadlineError) as raised, device.manager.rollout_phase():
        time.sleep(1.0 + 2.0 * rank)
    assert time.monotonic() - begin < 10.0
    return str(raised.value)


def test_ranks_that_have_sampled_measure_the_skew() -> None:
    first, _ = run_ranks(2, _one_engine_samples_longer_than_another)
    assert "within 0.5 s" in first
    assert "raise cluster.call_timeout_s" in first


class OneOfTheirs(Exception):
    """An error of another library, that cannot be read again."""

    def __init__(self, *, text: str) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return (OneOfTheirs, ())


def _one_engine_does_not_start(rank: int, error: Exception) -> tuple[str, list[str], bool]:
    control = ControlGroup(timeout_s=STAGE_S)
    started: list[SlowEngine] = []

    def build() -> SlowEngine:
        if rank == 1:
            raise error if isinstance(error, ConfigErrors) else OneOfTheirs(text=str(error))
        started.append(_late_engine())
        return started[0]

    with pytest.raises((ConfigErrors, EngineError)) as raised:
        start_engine(build, ranks=range(rank, rank + 1), config=rollout_config(), control=control)
    is_left = any(engine.is_alive for engine in started)
    return f"{type(raised.value).__name__}: {raised.value}", raised.value.__notes__, is_left


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ConfigErrors([ConfigError("rollout.engine_args.x", 1, "unknown", "drop it")]),
            "ConfigErrors",
        ),
        (OSError("no such kernel"), "EngineError: OneOfTheirs: no such kernel"),
    ],
)
def test_all_ranks_raise_what_one_engine_did_not_start_for(error: Exception, text: str) -> None:
    for raised, notes, is_left in run_ranks(2, _one_engine_does_not_start, error):
        assert raised.startswith(text)
        assert notes == ["the rollout engine of rank 1 did not start"]
        assert not is_left


def _phases_of_slow_engines(rank: int, fault: str) -> tuple[list[str], list[State], int]:
    """Two phases, in the first of which rank 1 is at fault; both ranks must come through both."""
    device = recording_device(rank, kind=SlowEngine, timeout_s=STAGE_S, stage_timeout_s=STAGE_S)
    engine, manager = device.engine, device.manager
    assert isinstance(engine, SlowEngine)
    endings = []
    for phase in range(2):
        is_at_fault = rank == 1 and phase == 0
        try:
            if is_at_fault and fault == "resume":
                engine.journal.fail(1, "resume", "kv_cache")
            with manager.rollout_phase():
                engine.serve()
                engine.keeps = MemoryTag.KV_CACHE if is_at_fault and fault == "keep" else None
                engine.is_crawling = is_at_fault and fault == "crawl"
            endings.append("")
        except StageError as error:
            endings.append(str(error))
        manager.require_training()
    return endings, list(manager._life.states), engine.journal.calls(rank).count("restart")


@pytest.mark.shows("2.15")
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("resume", "resume_cache failed on engine 1: InjectedFault: resume kv_cache of 1"),
        ("keep", ""),
        ("crawl", ""),
    ],
)
def test_an_engine_that_fails_or_keeps_memory_restarts_longer_than_a_stage(
    fault: str, error: str
) -> None:
    answers = run_ranks(2, _phases_of_slow_engines, fault)
    for rank, ((first, second), states, num_restarts) in enumerate(answers):
        assert first.partition(" failed before")[0] == error
        assert second == ""
        assert states == [State.ASLEEP] * 2
        assert num_restarts == rank
