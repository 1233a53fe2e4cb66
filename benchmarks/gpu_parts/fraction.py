"""Ten GRPO steps of a 7B model at a high memory fraction."""

from __future__ import annotations

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.machine import device_gib, host_gib
from benchmarks.gpu_parts.rank import Rank, Setup
from benchmarks.gpu_parts.watch import free_after_all

_FULL_DEVICE_GIB = 130
_FULL_HOST_GIB = 110
_MIB = 2**20


def run(bench: Bench, *, memory_fraction: float) -> None:
    """Train all weights where device and host hold them, else an adapter; says which."""
    is_full = device_gib() >= _FULL_DEVICE_GIB and host_gib() >= _FULL_HOST_GIB
    setup = Setup(
        shape="qwen2.5-7b",
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
                bench.record.figure(f"free_after_step_{number}_mib", free / _MIB, "MiB")
    if bench.is_dry:
        bench.record.not_exercised("the limit of device memory")
