"""What the machine is and can do: versions, bandwidths, and our own offload."""

from __future__ import annotations

import os
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing

from benchmarks.gpu_parts.bench import GIB, MIB, Bench, device_gib, host_gib, version_of
from benchmarks.sides.measure import seconds_of
from hybridrl.workers.train.offload import OffloadedTensors

_VARIABLES = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "CUDA_HOME"),
    *("NCCL_GRAPH_REGISTER", "LD_LIBRARY_PATH", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"),
)


def run_start_up(bench: Bench) -> None:
    """Look, compute a little, and say what is missing."""
    record = bench.record
    record.figure("device_gib", device_gib(), "GiB")
    record.figure("host_gib", host_gib(), "GiB")
    record.figure("disk_free_gib", shutil.disk_usage(bench.scratch).free / GIB, "GiB")
    record.figure("shared_memory_gib", shutil.disk_usage("/dev/shm").free / GIB, "GiB")
    record.figure("disk_write_gb_s", _disk_write(bench), "GB/s")
    for name in _VARIABLES:
        record.note(f"{name}={os.environ.get(name, '')}")
    for package in ("sglang", "torch-memory-saver", "peft", "ray", "tensordict"):
        if version_of(package) is None:
            record.note(f"missing: {package}")
    if not bench.on_cuda:
        record.not_exercised("the device: there is none")
        return
    nvcc = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    record.figure("nvcc", float(shutil.which("nvcc") is not None or nvcc.is_file()), "yes")
    free, total = torch.cuda.mem_get_info()
    record.figure("taken_before_mib", (total - free) / 2**20, "MiB")
    record.figure("matmul_tflops", _matmul_tflops(), "TFLOP/s")
    record.figure("cuda_ipc", float(_ipc_works()), "yes")


def _ipc_works() -> bool:
    """Return whether another process reads a tensor of this one's device memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Queue(), context.Queue()
    tensor = torch.arange(1000, device="cuda")
    child = context.Process(target=_add_up, args=(here, there), daemon=True)
    child.start()
    here.put(tensor)
    try:
        return bool(there.get(timeout=60.0) == int(tensor.sum()))
    except queue.Empty:
        return False
    finally:
        child.kill()
        child.join()


def _add_up(tensors: Any, sums: Any) -> None:  # noqa: ANN401 - queues of a start method
    sums.put(int(tensors.get().sum()))


def _disk_write(bench: Bench) -> float:
    """Return GB/s of 2 GiB written and flushed where models are kept."""
    block = os.urandom(2**20) * bench.size(64, dry=1)
    begin = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=bench.scratch) as file:
        for _ in range(bench.size(32, dry=2)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return size / (time.perf_counter() - begin) / 1e9


def _matmul_tflops() -> float:
    """Return the rate of a large bfloat16 product on random numbers."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_on(a.device, lambda: [a @ b for _ in range(10)], repeats=1, num_warmup=1)
    return 10 * 2 * size**3 / seconds / 1e12


def run(bench: Bench) -> None:
    """Measure copies of 4 GiB, and 16 GiB of odd-sized tensors through ``OffloadedTensors``."""
    to_host, to_device = pinned_bandwidth(bench)
    rates = {"pinned_to_host_gb_s": to_host, "pinned_to_device_gb_s": to_device}
    bench.record.figures(rates, "GB/s")
    _device_copies(bench)
    _parking(bench, to_host, to_device)


def pinned_bandwidth(bench: Bench) -> tuple[float, float]:
    """Return GB/s from device to pinned host memory and back, one large copy at a time."""
    num_bytes = bench.size(4096, dry=4) * MIB
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=bench.on_cuda)
    device = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    to_host = seconds_on(bench.device, lambda: host.copy_(device, non_blocking=True))
    to_device = seconds_on(bench.device, lambda: device.copy_(host, non_blocking=True))
    if not bench.on_cuda:
        bench.record.not_exercised("pinned copies: host memory was copied instead")
    return num_bytes / to_host / 1e9, num_bytes / to_device / 1e9


def seconds_on(
    device: torch.device, action: Callable[[], object], *, repeats: int = 5, num_warmup: int = 1
) -> float:
    """Return the median seconds of an action, waited for on the device."""

    def waited() -> None:
        action()
        synchronize(device)

    synchronize(device)
    return statistics.median([seconds_of(waited) for _ in range(num_warmup + repeats)][num_warmup:])


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is never ahead."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_copies(bench: Bench) -> None:
    num_bytes = bench.size(8192, dry=4) * MIB
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = seconds_on(bench.device, lambda: target.copy_(source))
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
        times.append((time.perf_counter() - begin, seconds_of(parked.restore)))
    bench.record.figure("first_park_s", times[0][0], "s")
    away = num_bytes / statistics.median(t[0] for t in times[1:]) / 1e9
    back = num_bytes / statistics.median(t[1] for t in times[1:]) / 1e9
    bench.record.figures({"park_gb_s": away, "unpark_gb_s": back}, "GB/s")
    bench.record.figures({"park_share": away / to_host, "unpark_share": back / to_device}, "1")
    if bench.on_cuda:
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
