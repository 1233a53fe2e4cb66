from __future__ import annotations

import pytest

from hybridrl.errors import PhaseError
from hybridrl.metrics import Max, Sum, check_declared
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from tests.ranks import run_ranks
from tests.workers.sharding.managers import sharding_manager
from tests.workers.sharding.recording import (
    TENANT,
    WEIGHTS,
    Journal,
    RecordingEngine,
    RecordingTenant,
    recording_device,
    rollout_config,
)

WEIGHT_BYTES = 4 * sum(WEIGHTS.values())
ENGINE_BYTES = WEIGHT_BYTES + 4 * (3 + 64 + 8)


@pytest.mark.shows("4.22")
def test_training_and_sampling_exclude_each_other() -> None:
    device = recording_device()
    assert device.engine is not None
    for _ in range(2):
        device.manager.require_training()
        assert device.manager._colocated.engine_bytes() == 0
        with device.manager.rollout_phase():
            assert device.manager._life.states == (State.READY,)
            assert device.manager._colocated.engine_bytes() == ENGINE_BYTES
            with pytest.raises(PhaseError, match=r"holds the device \(engines are 0: READY; tr"):
                device.manager.require_training()
            with pytest.raises(PhaseError, match="a rollout phase is already open"):
                device.serve()
            with pytest.raises(PhaseError, match="holds the device"):
                device.manager.register("critic", RecordingTenant(device.journal))
        device.manager.require_training()
        assert device.manager._life.states == (State.ASLEEP,)
    for _ in range(2):
        device.manager.shutdown()
        assert not device.engine.is_alive


def test_there_is_no_phase_without_a_policy() -> None:
    manager = sharding_manager(RecordingEngine(0, Journal()), config=rollout_config())
    for _ in range(2):
        with pytest.raises(PhaseError, match="call attach_policy first"), manager.rollout_phase():
            pass
        manager.require_training()


@pytest.mark.shows("3.15")
def test_each_stage_reports_its_seconds_and_bytes_once() -> None:
    device = recording_device()
    assert device.engine is not None
    bytes_of_phase = {
        "memory/released_bytes": Sum(ENGINE_BYTES),
        "memory/weight_backup_bytes": Sum(12),
        "memory/weight_backup_saved_bytes": Sum(WEIGHT_BYTES),
    }
    moving = {
        *("offload_optimizer", "resume_weights", "sync", "offload_parameters", "resume_cache"),
        *("release", "onload_training"),
    }
    timed = moving | {"continue", "skew", "pause", "drain"}
    started = device.manager.take_metrics()
    peaks = {"time/start_s", "memory/start_peak_bytes/max"}
    assert started.items() >= bytes_of_phase.items()
    assert started.keys() == bytes_of_phase.keys() | peaks
    bytes_of_phase["memory/synced_bytes"] = Sum(WEIGHT_BYTES)
    for _ in range(2):
        device.serve()
        metrics = device.manager.take_metrics()
        check_declared(metrics)
        assert metrics.items() >= bytes_of_phase.items()
        seconds = {f"time/{stage}_s" for stage in timed}
        peaks = {f"memory/{stage}_peak_bytes/max" for stage in moving}
        assert metrics.keys() == bytes_of_phase.keys() | seconds | peaks
        assert all(isinstance(metrics[name], Max) for name in seconds | peaks)
        assert all(metrics[name].value > 0.0 for name in seconds)
    assert device.manager.take_metrics() == {}
    device.engine.load_s = 0.05
    device.serve()
    device.serve()
    metrics = device.manager.take_metrics()
    assert metrics["memory/synced_bytes"] == Sum(2 * WEIGHT_BYTES)
    assert metrics["memory/released_bytes"] == Sum(2 * ENGINE_BYTES)
    assert metrics["time/sync_s"].value >= 0.1


def test_the_names_of_failed_stages_are_declared_too() -> None:
    device = recording_device()
    for call, part in (("resume", "kv_cache"), ("finish_update", ""), ("drain", "")):
        device.journal.fail(0, call, part)
        with pytest.raises(StageError):
            device.serve()
    device.serve()
    metrics = device.manager.take_metrics()
    check_declared(metrics)
    assert {"time/roll_back_s", "time/restart_s", "time/start_s"} <= set(metrics)


def _body_raises_on_rank_one(rank: int) -> list[State]:
    device = recording_device(rank)
    for _ in range(2):
        try:
            with device.manager.rollout_phase():
                if rank == 1:
                    raise OSError("the prompt is bad")
        except OSError:
            assert rank == 1
        device.train()
    assert device.serve()
    return list(device.manager._life.states)


def test_ranks_meet_at_the_exit_when_the_body_of_one_raises() -> None:
    asleep = [State.ASLEEP, State.ASLEEP]
    assert run_ranks(2, _body_raises_on_rank_one) == [asleep, asleep]


def _two_engines_on_four_ranks(rank: int) -> tuple[int, int, float, list[str]]:
    device = recording_device(rank, tensor_parallel_size=2)
    for _ in range(3):
        assert device.serve()
        device.train()
    calls = device.journal.calls()
    bytes_sent = device.manager.take_metrics()["memory/synced_bytes"].value
    if rank == 2:
        device.journal.fail(2, "load")
    with pytest.raises(StageError) as raised:
        device.serve()
    texts = [str(raised.value)]
    if rank == 3:  # owns no engine, gathers all the same
        device.journal.fail(TENANT, "full_weights")
    with pytest.raises(StageError) as raised:
        device.serve()
    texts.append(str(raised.value))
    assert device.serve()
    device.train()
    return len(device.manager._life.states), calls.count("full_weights"), bytes_sent, texts


@pytest.mark.shows("2.6", "3.10")
def test_only_leaders_have_engines_and_all_ranks_gather() -> None:
    answers = run_ranks(4, _two_engines_on_four_ranks)
    for rank, (num_engines, num_gathers, bytes_sent, texts) in enumerate(answers):
        assert (num_engines, num_gathers) == (2, 3)
        assert bytes_sent == (0 if rank % 2 else 3 * WEIGHT_BYTES)
        assert texts[0].startswith("sync failed on engine 1: InjectedFault: load")
        assert texts[1].startswith("sync failed on engine 1: InjectedFault: full_weights")
