"""The life cycle with SGLang on a CUDA device: what a CPU answers and does not do.

One server serves all tests of full fine-tuning, a second one those of LoRA.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from benchmarks.gpu_parts.bench import Bench, Recorder, Result
from benchmarks.gpu_parts.rank import (
    Cycle,
    Rank,
    Setup,
    checksums,
    count_graph_captures,
    free_after_all,
    largest_difference,
)
from hybridrl.errors import PhaseError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.sharding.control import StageError
from hybridrl.workers.sharding.lifecycle import State
from hybridrl.workers.sharding.memory import DeviceMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(420),
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs sglang"),
]

DEVICE = torch.device("cuda:0")
GIB = 2**30
MIB = 2**20
SMALL = Setup(
    shape="small",
    memory_fraction=0.3,
    num_prompts=4,
    group_size=2,
    prompt_tokens=16,
    response_tokens=16,
    pack_tokens=1024,
)


def build(folder: Path, setup: Setup) -> Rank:
    words = os.environ.get("HYBRIDRL_TEST_ENGINE_ARGS", "")
    bench = Bench(
        record=Recorder(Result("tests", is_dry=False), folder),
        is_dry=False,
        engine="sglang",
        scratch=folder,
        device=DEVICE,
        engine_args=tuple(filter(None, words.split(","))),
    )
    return Rank(bench, setup)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    """Full fine-tuning, one step taken: there are moments."""
    with build(tmp_path_factory.mktemp("full"), SMALL) as rank:
        rank.step()
        yield rank


def used() -> int:
    DeviceMemory(DEVICE).empty_cache()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


@contextmanager
def ballast(num_bytes: int) -> Iterator[None]:
    """Take device memory in another process: what torch holds here, the worker would refuse."""
    context = mp.get_context("spawn")
    is_there, may_go = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(num_bytes, is_there, may_go), daemon=True)
    holder.start()
    try:
        assert is_there.wait(60.0)
        yield
    finally:
        may_go.set()
        holder.join()


def _hold(num_bytes: int, is_there: Event, may_go: Event) -> None:
    held = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    is_there.set()
    may_go.wait()
    del held


def asleep(rank: Rank) -> None:
    assert rank.worker.sharding._life.states == (State.ASLEEP,)


@pytest.mark.shows("1.17")
def test_greedy_tokens_and_log_probs_are_the_same_in_each_of_four_cycles(rank: Rank) -> None:
    cycles = [rank.cycle() for _ in range(4)]
    assert largest_difference(cycles) == 0.0
    assert len({tuple(map(tuple, cycle.token_ids)) for cycle in cycles}) == 1
    asleep(rank)


def test_an_update_shows_in_the_next_cycle_and_engine_and_trainer_agree(rank: Rank) -> None:
    for _ in range(2):
        before = rank.cycle()
        found = rank.step()
        assert found["policy/sampler_mismatch_nats/mean"] < 0.05
        assert largest_difference([before, rank.cycle()]) > 0.0


def test_free_memory_returns_to_the_same_value_after_each_cycle(rank: Rank) -> None:
    free = [rank.cycle().free_after or 0 for _ in range(4)]
    assert max(free[1:]) - min(free[1:]) <= 64 * MIB


@pytest.mark.shows("2.15")
def test_a_sleeping_engine_holds_little_and_an_awake_one_what_it_says(rank: Rank) -> None:
    before = used()
    with rank.worker.sharding.rollout_phase() as engine:
        assert engine is not None
        said = sum(engine.resident_bytes(part) for part in MemoryTag)
        awake = used()
    assert said > 0.2 * torch.cuda.get_device_properties(DEVICE).total_memory
    training = sum(rank.training_bytes().values())
    assert awake - before >= said - training - GIB
    assert abs(used() - before) <= 64 * MIB


@pytest.mark.shows("3.5", "3.6")
def test_parts_are_resumed_apart_and_nothing_is_sampled_until_all_are_there(rank: Rank) -> None:
    managed, engine = rank.managed, rank.engine
    for _cycle in range(2):
        start = used()
        managed.resume_weights()
        weights = used()
        assert 16 * MIB < weights - start < 2 * GIB
        managed.continue_generation()  # nobody but the engine itself is in the way now
        with pytest.raises(PhaseError, match="KV_CACHE is released"):
            rank.ask(engine)
        managed.pause()
        managed.resume_cache()
        cache = used()
        assert cache - weights > 10 * GIB
        managed.release_cache()
        assert abs(used() - weights) <= 64 * MIB
        managed.release_all()
        assert abs(used() - start) <= 64 * MIB
        assert rank.cycle().token_ids


@pytest.mark.shows("3.4")
def test_graphs_are_captured_once_over_all_cycles(rank: Rank) -> None:
    for _ in range(2):
        rank.cycle()
    assert count_graph_captures(rank.engine) == 1


@pytest.mark.shows("3.11")
def test_the_cache_does_not_share_the_device_with_training_state_at_the_sync(rank: Rank) -> None:
    with rank.worker.sharding.rollout_phase() as engine:
        assert engine is not None
        cache = engine.resident_bytes(MemoryTag.KV_CACHE)
    cycle = rank.cycle()
    assert cycle.peaks["sync"] + cache // 2 < cycle.peaks["sample"]


@pytest.mark.shows("3.2")
def test_memory_that_torch_only_caches_is_there_for_the_engine(rank: Rank) -> None:
    for _ in range(2):
        free, _total = torch.cuda.mem_get_info(DEVICE)
        hoard = torch.empty(int(free * 0.9), dtype=torch.uint8, device=DEVICE)
        del hoard  # torch keeps it: without empty_cache before the resume the engine would starve
        assert rank.cycle().token_ids


@pytest.mark.shows("3.13")
def test_a_resume_without_room_is_one_error_and_the_next_phase_works(rank: Rank) -> None:
    good = rank.cycle()
    free = free_after_all(DEVICE) or 0
    with ballast(free - 4 * GIB), pytest.raises(StageError) as raised:
        rank.cycle()
    assert raised.value.stage in ("resume_weights", "resume_cache")
    assert largest_difference([good, rank.cycle()]) == 0.0


@pytest.mark.shows("3.15")
def test_each_stage_reports_seconds_bytes_and_a_peak(rank: Rank) -> None:
    cycle = rank.cycle()
    for stage in (
        "offload_optimizer",
        "resume_weights",
        "sync",
        "offload_parameters",
        "resume_cache",
        "release",
    ):
        assert cycle.seconds[stage] > 0.0
    assert cycle.num_bytes["synced_bytes"] > 0
    assert cycle.num_bytes["released_bytes"] > 10 * GIB
    assert "sample" in cycle.peaks


def test_an_engine_that_died_is_started_again_on_an_empty_device(rank: Rank) -> None:
    good = rank.cycle()
    rank.engine.shutdown()
    with pytest.raises(StageError):
        rank.cycle()
    assert largest_difference([good, rank.cycle()]) == 0.0
    asleep(rank)


# -- LoRA ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    """An adapter beside a base that sleeps in a copy on the host."""
    with build(tmp_path_factory.mktemp("lora"), replace(SMALL, lora_base="backup")) as rank:
        rank.step()
        yield rank


def _sums_and_cycle(rank: Rank, *, version: int) -> tuple[dict[str, str], Cycle]:
    rank.worker.sharding.weights_changed(version=version)
    with rank.worker.sharding.rollout_phase() as engine:
        assert engine is not None
        found = checksums(engine)
    return found, rank.cycle()


@pytest.mark.shows("1.1")
def test_a_base_kept_on_the_host_is_bit_by_bit_the_same_after_each_sleep(adapted: Rank) -> None:
    sums, first = _sums_and_cycle(adapted, version=50)
    assert len(sums) > 10
    for version in (51, 52):
        again, cycle = _sums_and_cycle(adapted, version=version)
        assert again == sums
        assert largest_difference([first, cycle]) == 0.0


@pytest.mark.shows("1.8")
def test_a_later_sync_sends_the_adapter_alone(adapted: Rank) -> None:
    adapted.cycle()
    adapted.worker.sharding.weights_changed(version=60)
    sent = adapted.cycle().num_bytes["synced_bytes"]
    names = [t for t in adapted.engine.weight_memory() if "lora_" in t.name]
    assert 0 < sent <= 2 * sum(t.num_bytes for t in names)  # float32 adapters of a bfloat16 engine
    assert sent < sum(t.num_bytes for t in adapted.engine.weight_memory())
