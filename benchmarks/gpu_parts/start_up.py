"""Versions, and what is known to break an engine on such a machine, before anything starts."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.machine import GIB, device_gib, host_gib, version_of


def run(bench: Bench) -> None:
    """Look, compute a little, and say what is missing."""
    record = bench.record
    record.figure("device_gib", device_gib(), "GiB")
    record.figure("host_gib", host_gib(), "GiB")
    record.figure("disk_free_gib", shutil.disk_usage(bench.scratch).free / GIB, "GiB")
    record.figure("shared_memory_gib", shutil.disk_usage("/dev/shm").free / GIB, "GiB")
    record.figure("disk_write_gb_s", _disk_write(bench), "GB/s")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "CUDA_HOME"):
        record.note(f"{name}={os.environ.get(name, '')}")
    for name in ("NCCL_GRAPH_REGISTER", "LD_LIBRARY_PATH", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        record.note(f"{name}={os.environ.get(name, '')}")
    for package in ("sglang", "torch-memory-saver", "peft", "ray", "tensordict"):
        if version_of(package) is None:
            record.note(f"missing: {package}")
    if bench.device.type != "cuda":
        record.not_exercised("the device: there is none")
        return
    record.figure("nvcc", float(shutil.which("nvcc") is not None or _has_nvcc()), "yes")
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


def _has_nvcc() -> bool:
    return Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc").is_file()


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
    for _ in range(3):
        a @ b
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * size**3 / (begin.elapsed_time(end) / 1000) / 1e12
