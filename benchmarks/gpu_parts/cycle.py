"""The whole cycle of full fine-tuning, ten times: nothing changes, nothing leaks, and its price."""

from __future__ import annotations

from functools import partial

from benchmarks.gpu_parts import server
from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Cycle, Rank, Setup, largest_difference, medians
from benchmarks.gpu_parts.transfers import pinned_bandwidth

_MIB = 2**20
_STEP_S = 120.0
_HOST = ("offload_optimizer", "offload_parameters", "onload_training")
_WAKE = ("resume_weights", "sync", "resume_cache")
_DOWN = ("pause", "drain", "release")
_REST = ("continue", "skew")


def run(bench: Bench, *, shape: str, memory_fraction: float) -> None:
    """Take one optimizer step, so that there are moments; then wake and sleep ten times."""
    setup = Setup(shape=shape, memory_fraction=memory_fraction)
    to_host, to_device = pinned_bandwidth(bench)
    with Rank(bench, setup) as rank:
        bench.record.figure("start_s", rank.start_s, "s")
        first = rank.step()
        bench.record.figure("first_step_s", first["generate_s"] + first["update_s"], "s")
        held = rank.training_bytes()
        bench.record.figures({f"{part}_bytes": size for part, size in held.items()}, "bytes")
        first_cycle = rank.cycle()
        bench.record.figures(
            {f"first_{name}_s": value for name, value in first_cycle.seconds.items()}, "s"
        )
        cycles = [rank.cycle() for _ in range(bench.size(10, dry=2))]
        _equality(bench, cycles)
        _memory(bench, cycles)
        _times(bench, cycles)
        _host_transfers(bench, cycles, held, to_host=to_host, to_device=to_device)
        captures = server.count_graph_captures(rank.engine)
        if captures is None:
            bench.record.not_exercised("CUDA graphs: nothing here captures any")
        else:
            bench.record.figure("graph_captures", captures, "1")


def _equality(bench: Bench, cycles: list[Cycle]) -> None:
    difference = largest_difference(cycles)
    bench.record.figure("cycles", len(cycles), "1")
    bench.record.figure("tokens_equal", float(difference != float("inf")), "yes")
    bench.record.figure("logprob_difference_nats", difference, "nats")


def _memory(bench: Bench, cycles: list[Cycle]) -> None:
    free = [cycle.free_after for cycle in cycles if cycle.free_after is not None]
    if not free:
        bench.record.not_exercised("free device memory and its peaks: there is no device")
        return
    bench.record.figure("free_spread_mib", (max(free) - min(free)) / _MIB, "MiB")
    bench.record.figure("free_first_mib", free[0] / _MIB, "MiB")
    bench.record.figure("free_last_mib", free[-1] / _MIB, "MiB")
    for name in {name for cycle in cycles for name in cycle.peaks}:
        peak = max(cycle.peaks.get(name, 0) for cycle in cycles)
        bench.record.figure(f"peak_{name}_mib", peak / _MIB, "MiB")


def _times(bench: Bench, cycles: list[Cycle]) -> None:
    seconds = medians(cycles)
    record = bench.record
    record.figures({f"{name}_s": value for name, value in seconds.items()}, "s")
    record.figures(dict(cycles[-1].num_bytes), "bytes")
    total = partial(_total, seconds)
    record.figure("wake_s", total(_WAKE), "s")
    record.figure("drain_release_s", total(_DOWN), "s")
    record.figure("host_transfers_s", total(_HOST), "s")
    overhead = total((*_HOST, *_WAKE, *_DOWN, *_REST))
    record.figure("overhead_s", overhead, "s")
    record.figure("overhead_share", overhead / _STEP_S, "1")
    record.note("overhead_share: stages of one measured cycle over a step of 120 s, computed")


def _host_transfers(
    bench: Bench, cycles: list[Cycle], held: dict[str, int], *, to_host: float, to_device: float
) -> None:
    """Compare with pinned copies; gradients are dropped by the step and never travel."""
    seconds = medians(cycles)
    num_bytes = held["parameters"] + held["optimizer"]
    away = num_bytes / (seconds["offload_optimizer"] + seconds["offload_parameters"]) / 1e9
    back = num_bytes / seconds["onload_training"] / 1e9
    bench.record.figure("host_bytes", num_bytes, "bytes")
    bench.record.figure("offload_gb_s", away, "GB/s")
    bench.record.figure("restore_gb_s", back, "GB/s")
    bench.record.figure("offload_share", away / to_host, "1")
    bench.record.figure("restore_share", back / to_device, "1")


def _total(seconds: dict[str, float], stages: tuple[str, ...]) -> float:
    return sum(seconds.get(stage, 0.0) for stage in stages)
