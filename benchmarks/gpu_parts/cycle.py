"""Wake, sync, sleep: what a cycle costs, what it changes, and where device memory ends."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from benchmarks.gpu_parts.bench import MIB, Bench, device_gib, host_gib
from benchmarks.gpu_parts.rank import (
    Cycle,
    DeviceWatch,
    Rank,
    Setup,
    count_graph_captures,
    free_after_all,
    largest_difference,
    medians,
)
from benchmarks.gpu_parts.transfers import pinned_bandwidth
from hybridrl.diagnostics import trace
from hybridrl.errors import HybridRLError
from hybridrl.workers.sharding.managed_engine import WeightLedger

_7B = "qwen2.5-7b"
_STEP_S = 120.0
_SEEN_NATS = 0.5
_FULL_DEVICE_GIB, _FULL_HOST_GIB = 130, 110
_HOST = ("offload_optimizer", "offload_parameters", "onload_training")
_WAKE = ("resume_weights", "sync", "resume_cache")
_DOWN = ("pause", "drain", "release")
_REST = ("continue", "skew")
_STAGED = ("offload_optimizer", *_WAKE, "offload_parameters", "continue")


def run(bench: Bench, *, shape: str, memory_fraction: float) -> None:
    """Take one optimizer step, so that there are moments; then wake and sleep ten times."""
    record = bench.record
    to_host, to_device = pinned_bandwidth(bench)
    with Rank(bench, Setup(shape=shape, memory_fraction=memory_fraction)) as rank:
        record.figure("start_s", rank.start_s, "s")
        first = rank.step()
        record.figure("first_step_s", first["generate_s"] + first["update_s"], "s")
        held = rank.training_bytes()
        record.figures({f"{part}_bytes": size for part, size in held.items()}, "bytes")
        _record_seconds(bench, rank.cycle().seconds, prefix="first_")
        cycles = [rank.cycle() for _ in range(bench.size(10, dry=2))]
        captures = count_graph_captures(rank.engine)
    record.figure("cycles", len(cycles), "1")
    _record_equality(bench, cycles)
    _record_memory(bench, cycles)
    seconds = medians(cycles)
    _record_seconds(bench, seconds)
    record.figures(dict(cycles[-1].num_bytes), "bytes")
    record.figure("wake_s", _total(seconds, _WAKE), "s")
    record.figure("drain_release_s", _total(seconds, _DOWN), "s")
    record.figure("host_transfers_s", _total(seconds, _HOST), "s")
    overhead = _total(seconds, (*_HOST, *_WAKE, *_DOWN, *_REST))
    record.figure("overhead_s", overhead, "s")
    record.figure("overhead_share", overhead / _STEP_S, "1")
    record.note("overhead_share: stages of one measured cycle over a step of 120 s, computed")
    num_bytes = held["parameters"] + held["optimizer"]  # the step drops gradients
    away = num_bytes / _total(seconds, _HOST[:2]) / 1e9
    back = num_bytes / seconds["onload_training"] / 1e9
    record.figure("host_bytes", num_bytes, "bytes")
    record.figures({"offload_gb_s": away, "restore_gb_s": back}, "GB/s")
    record.figures({"offload_share": away / to_host, "restore_share": back / to_device}, "1")
    if captures is None:
        record.not_exercised("CUDA graphs: nothing here captures any")
    else:
        record.figure("graph_captures", captures, "1")


def _record_equality(bench: Bench, cycles: list[Cycle]) -> None:
    difference = largest_difference(cycles)
    bench.record.figure("tokens_equal", float(difference != float("inf")), "yes")
    bench.record.figure("logprob_difference_nats", difference, "nats")


def _record_memory(bench: Bench, cycles: list[Cycle]) -> None:
    free = [cycle.free_after / MIB for cycle in cycles if cycle.free_after is not None]
    if not free:
        bench.record.not_exercised("free device memory and its peaks: there is no device")
        return
    found = {"spread": max(free) - min(free), "first": free[0], "last": free[-1]}
    bench.record.figures({f"free_{name}_mib": value for name, value in found.items()}, "MiB")
    for name in {name for cycle in cycles for name in cycle.peaks}:
        peak = max(cycle.peaks.get(name, 0) for cycle in cycles)
        bench.record.figure(f"peak_{name}_mib", peak / MIB, "MiB")


def _record_seconds(bench: Bench, seconds: dict[str, float], *, prefix: str = "") -> None:
    bench.record.figures({f"{prefix}{name}_s": value for name, value in seconds.items()}, "s")


def _total(seconds: dict[str, float], stages: Iterable[str]) -> float:
    return sum(seconds.get(stage, 0.0) for stage in stages)


def run_sync(bench: Bench) -> None:
    """Sync 8B bfloat16 weights again and again; the median is without the first one."""
    record = bench.record
    with Rank(bench, Setup(shape="qwen3-8b", masters="bfloat16", memory_fraction=0.5)) as rank:
        record.figure("start_s", rank.start_s, "s")
        record.figure("first_sync_s", rank.cycle().seconds["sync"], "s")
        cycles = [rank.cycle() for _ in range(bench.size(10, dry=2))]
    seconds = medians(cycles)
    num_bytes = cycles[-1].num_bytes.get("synced_bytes", 0)
    _record_seconds(bench, {name: seconds[name] for name in _WAKE})
    record.figure("slowest_sync_s", max(c.seconds["sync"] for c in cycles), "s")
    record.figure("synced_bytes", num_bytes, "bytes")
    record.figure("sync_gb_s", num_bytes / seconds["sync"] / 1e9, "GB/s")
    record.figure("logprob_difference_nats", largest_difference(cycles), "nats")


def run_steps(bench: Bench, *, memory_fraction: float) -> None:
    """Train all weights where device and host hold them, else an adapter; says which."""
    is_full = device_gib() >= _FULL_DEVICE_GIB and host_gib() >= _FULL_HOST_GIB
    setup = Setup(
        shape=_7B,
        memory_fraction=memory_fraction,
        masters="float32" if is_full else "bfloat16",
        lora_base=None if is_full else "resend",
        response_tokens=256,
    )
    way = "full fine-tuning, optimizer and masters offloaded" if is_full else "LoRA of rank 32"
    bench.record.note(way)
    bench.record.figure("steps", 0, "1")
    with Rank(bench, setup) as rank:
        for number in range(1, bench.size(10, dry=2) + 1):
            found = rank.step()
            bench.record.figure("steps", number, "1")
            bench.record.figure("step_s", found["generate_s"] + found["update_s"], "s")
            mismatch = found.get("policy/sampler_mismatch_nats/mean")
            if mismatch is not None:
                bench.record.figure("sampler_mismatch_nats", mismatch, "nats")
            free = free_after_all(bench.device)
            if free is not None:
                bench.record.figure(f"free_after_step_{number}_mib", free / MIB, "MiB")
    if bench.is_dry:
        bench.record.not_exercised("the limit of device memory")


def run_wake(bench: Bench) -> None:
    """At a fraction that leaves room for both ways, then at 0.9, where one should not fit."""
    with Rank(bench, Setup(shape=_7B, memory_fraction=0.5)) as rank:
        rank.cycle()  # the first one pins host memory
        cycles = [rank.cycle() for _ in range(bench.size(3, dry=1))]
        seconds = medians(cycles)
        bench.record.figure("staged_s", _total(seconds, _STAGED), "s")
        peaks = [max(cycle.peaks.values()) for cycle in cycles if cycle.peaks]
        if peaks:
            bench.record.figure("staged_peak_mib", max(peaks) / MIB, "MiB")
        took, peak = single_stage(bench, rank)
        bench.record.figure("single_stage_s", took, "s")
        if peak is not None:
            bench.record.figure("single_stage_peak_mib", peak / MIB, "MiB")
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
    rank = Rank(bench, Setup(shape=_7B, memory_fraction=0.9))
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


def run_lora(bench: Bench, *, base: str) -> None:
    """Train once, so that B is not zero; then wake and sleep ten times."""
    with Rank(bench, _setup(base)) as rank:
        bench.record.figure("start_s", rank.start_s, "s")
        rank.step()
        first = rank.cycle()
        _record_seconds(bench, first.seconds, prefix="first_")
        versions = range(100, 100 + bench.size(10, dry=2))
        cycles = [_cycle_with_adapter(rank, version=version) for version in versions]
    seconds = medians(cycles)
    _record_seconds(bench, seconds)
    bench.record.figures(dict(cycles[-1].num_bytes), "bytes")
    bench.record.figure("adapter_sync_s", seconds["sync"], "s")
    _record_equality(bench, [first, *cycles])


class BlindLedger(WeightLedger):
    """A ledger whose guard is off: it asks for no copy and enters no loss."""

    def backup_for(self, sent: Collection[str]) -> frozenset[str]:
        """Keep nothing."""
        return frozenset()

    def release(self, backup: Collection[str]) -> None:
        """Pretend that nothing is lost."""


def run_garbage(bench: Bench) -> None:
    """Lose the base once, on purpose; then let the true ledger mend it."""
    with Rank(bench, _setup("resend")) as rank:
        rank.step()
        good = rank.cycle()
        guard = rank.managed.ledger
        rank.managed.ledger = _blinded(rank)  # asleep: the base is lost, and nobody knows
        difference = _garbage(bench, rank, good)
        bench.record.figure("garbage_difference_nats", difference, "nats")
        bench.record.figure("garbage_seen", float(difference > _SEEN_NATS), "yes")
        if bench.is_dry:
            bench.record.not_exercised("that memory is lost: on a CPU it may stay as it was")
        rank.managed.ledger = guard
        _with_guard(bench, rank, good)


def _garbage(bench: Bench, rank: Rank, good: Cycle) -> float:
    """Return how far log-probs are off, in nats; infinite if the engine itself refuses them."""
    try:
        return largest_difference([good, _cycle_with_adapter(rank, version=100)])
    except HybridRLError as err:
        bench.record.note(f"sampling garbage: {type(err).__name__}: {str(err)[:400]}")
        return float("inf")


def _with_guard(bench: Bench, rank: Rank, good: Cycle) -> None:
    """The true ledger knows of the loss: the base is sent again, or nothing is sampled."""
    try:
        mended = _cycle_with_adapter(rank, version=101)
    except HybridRLError as err:
        bench.record.note(f"with the guard on: {type(err).__name__}: {str(err)[:400]}")
        bench.record.figure("refused_with_guard", 1, "yes")
        return
    difference = largest_difference([good, mended])
    bench.record.figure("mended_difference_nats", difference, "nats")
    bench.record.figure("refused_with_guard", float(difference <= _SEEN_NATS), "yes")


def _blinded(rank: Rank) -> BlindLedger:
    tensors = rank.engine.weight_memory()
    blind = BlindLedger(tensors)
    blind.receive([tensor.name for tensor in tensors])
    return blind


def _cycle_with_adapter(rank: Rank, *, version: int) -> Cycle:
    """Wake as after an optimizer step: the adapter is sent again, though it is the same."""
    rank.worker.sharding.weights_changed(version=version)
    return rank.cycle()


def _setup(base: str) -> Setup:
    return Setup(shape=_7B, masters="bfloat16", memory_fraction=0.6, lora_base=base)
