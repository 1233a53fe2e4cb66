"""What the machine can do: pinned bandwidth both ways, device copies, and our own offload."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_parts.bench import Bench
from hybridrl.workers.train.offload import OffloadedTensors

_MIB = 2**20
_REPEATS = 5


def run(bench: Bench) -> None:
    """Measure copies of 4 GiB, and 16 GiB of odd-sized tensors through ``OffloadedTensors``."""
    to_host, to_device = pinned_bandwidth(bench)
    bench.record.figure("pinned_to_host_gb_s", to_host, "GB/s")
    bench.record.figure("pinned_to_device_gb_s", to_device, "GB/s")
    _device_copies(bench)
    _parking(bench, to_host, to_device)


def pinned_bandwidth(bench: Bench) -> tuple[float, float]:
    """Return GB/s from device to pinned host memory and back, one large copy at a time."""
    num_bytes = bench.size(4096, dry=4) * _MIB
    on_cuda = bench.device.type == "cuda"
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_cuda)
    device = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    to_host = seconds_of(bench, lambda: host.copy_(device, non_blocking=True))
    to_device = seconds_of(bench, lambda: device.copy_(host, non_blocking=True))
    if not on_cuda:
        bench.record.not_exercised("pinned copies: host memory was copied instead")
    return num_bytes / to_host / 1e9, num_bytes / to_device / 1e9


def seconds_of(bench: Bench, action: Callable[[], object], *, repeats: int = _REPEATS) -> float:
    """Return the median seconds of an action, waited for; the first time does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(bench.device)
        begin = time.perf_counter()
        action()
        synchronize(bench.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is never ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_copies(bench: Bench) -> None:
    num_bytes = bench.size(8192, dry=4) * _MIB
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = seconds_of(bench, lambda: target.copy_(source))
    bench.record.figure("device_copy_gb_s", num_bytes / seconds / 1e9, "GB/s")
    bench.record.figure("device_copy_16_4_gb_s", 16.4 * seconds / (num_bytes / 1e9), "s")


def _parking(bench: Bench, to_host: float, to_device: float) -> None:
    """Offload and restore as training engines do; the first time pins the host memory."""
    tensors = _odd_tensors(bench)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    bench.record.figure("parked_bytes", num_bytes, "bytes")
    times: list[tuple[float, float]] = []
    for _ in range(bench.size(4, dry=2)):
        begin = time.perf_counter()
        parked = OffloadedTensors(tensors)
        middle = time.perf_counter()
        parked.restore()
        times.append((middle - begin, time.perf_counter() - middle))
    bench.record.figure("first_park_s", times[0][0], "s")
    away = num_bytes / statistics.median(t[0] for t in times[1:]) / 1e9
    back = num_bytes / statistics.median(t[1] for t in times[1:]) / 1e9
    bench.record.figure("park_gb_s", away, "GB/s")
    bench.record.figure("unpark_gb_s", back, "GB/s")
    bench.record.figure("park_share", away / to_host, "1")
    bench.record.figure("unpark_share", back / to_device, "1")
    if bench.device.type == "cuda":
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        bench.record.figure("pinned_peak_bytes", pinned, "bytes")


def _odd_tensors(bench: Bench) -> list[Tensor]:
    """Tensors as a 7B model has them: none is a power of two."""
    sizes = [(3584, 18944), (3584, 3584), (512, 3584), (3584,)]
    number = bench.size(50, dry=1)
    divisor = bench.size(1, dry=64)
    return [
        torch.ones([n // divisor for n in size], device=bench.device)
        for _ in range(number)
        for size in sizes
    ]
