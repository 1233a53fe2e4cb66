"""A full sync of 8B bfloat16 weights, beside the device copy of the same bytes."""

from __future__ import annotations

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.rank import Rank, Setup, largest_difference, medians


def run(bench: Bench) -> None:
    """Wake and sleep; the median sync without the first one."""
    setup = Setup(shape="qwen3-8b", masters="bfloat16", memory_fraction=0.5)
    with Rank(bench, setup) as rank:
        bench.record.figure("start_s", rank.start_s, "s")
        first = rank.cycle()
        bench.record.figure("first_sync_s", first.seconds["sync"], "s")
        cycles = [rank.cycle() for _ in range(bench.size(10, dry=2))]
    seconds = medians(cycles)
    num_bytes = cycles[-1].num_bytes.get("synced_bytes", 0)
    bench.record.figure("sync_s", seconds["sync"], "s")
    bench.record.figure("slowest_sync_s", max(c.seconds["sync"] for c in cycles), "s")
    bench.record.figure("synced_bytes", num_bytes, "bytes")
    bench.record.figure("sync_gb_s", num_bytes / seconds["sync"] / 1e9, "GB/s")
    bench.record.figure("resume_weights_s", seconds["resume_weights"], "s")
    bench.record.figure("resume_cache_s", seconds["resume_cache"], "s")
    bench.record.figure("logprob_difference_nats", largest_difference(cycles), "nats")
