"""Staged wake-up beside waking all at once: time and peak, and where the latter does not fit."""

from __future__ import annotations

import time

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Rank, Setup, medians
from benchmarks.gpu_parts.watch import DeviceWatch, free_after_all
from hybridrl.diagnostics import trace
from hybridrl.errors import HybridRLError

_MIB = 2**20
_WAKE = (
    "offload_optimizer",
    "resume_weights",
    "sync",
    "offload_parameters",
    "resume_cache",
    "continue",
)
_SHAPE = "qwen2.5-7b"


def run(bench: Bench) -> None:
    """At a fraction that leaves room for both ways, then at 0.9, where one should not fit."""
    with Rank(bench, Setup(shape=_SHAPE, memory_fraction=0.5)) as rank:
        rank.cycle()  # the first one pins host memory
        cycles = [rank.cycle() for _ in range(bench.size(3, dry=1))]
        seconds = medians(cycles)
        bench.record.figure("staged_s", sum(seconds.get(stage, 0.0) for stage in _WAKE), "s")
        peaks = [max(cycle.peaks.values()) for cycle in cycles if cycle.peaks]
        if peaks:
            bench.record.figure("staged_peak_mib", max(peaks) / _MIB, "MiB")
        took, peak = single_stage(bench, rank)
        bench.record.figure("single_stage_s", took, "s")
        if peak is not None:
            bench.record.figure("single_stage_peak_mib", peak / _MIB, "MiB")
        rank.cycle()  # nothing was broken by it
    _at_90(bench)


def single_stage(bench: Bench, rank: Rank) -> tuple[float, int | None]:
    """Wake everything, then sync, then let the weights leave: the order that is avoided.

    Goes past the life cycle, which has no such edge, from asleep to asleep.
    """
    sharding = rank.worker.sharding
    host, engines, managed = sharding._colocated, sharding._engines, rank.managed
    trace.take()
    begin = time.perf_counter()
    with DeviceWatch(bench.device) as watch, trace.span("single stage"):
        host.offload_optimizer()
        managed.resume_weights()
        managed.resume_cache()
        failures = engines.sync()
        host.offload_parameters()
        managed.continue_generation()
        took = time.perf_counter() - begin
    if failures:
        raise RuntimeError(f"the sync of a single-stage wake-up failed: {failures}")
    rank.ask(managed.engine)
    managed.pause()
    managed.drain()
    managed.release_all()
    host.onload_training()
    free_after_all(bench.device)
    return took, watch.peaks(trace.take()).get("single stage")


def _at_90(bench: Bench) -> None:
    if bench.is_dry:
        bench.record.not_exercised("running out of memory at fraction 0.9: needs a device")
        return
    rank = Rank(bench, Setup(shape=_SHAPE, memory_fraction=0.9))
    try:
        rank.cycle()
        bench.record.figure("staged_works_at_90", 1, "yes")
        single_stage(bench, rank)
        bench.record.figure("single_stage_fails", 0, "yes")
    except (HybridRLError, RuntimeError, OSError) as err:
        if "staged_works_at_90" not in bench.record.result.figures:
            raise
        bench.record.figure("single_stage_fails", 1, "yes")
        bench.record.note(f"single stage at 0.9: {type(err).__name__}: {str(err)[:600]}")
    finally:
        rank.worker.close()
