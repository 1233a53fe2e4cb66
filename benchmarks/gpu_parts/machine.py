"""What machine this is, and whether it is large enough for a part."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_parts.result import Skip

GIB = 2**30
HOST_GIB = "GPU_BENCH_HOST_GIB"
_PACKAGES = (
    *("torch", "transformers", "sglang", "sglang-kernel", "sgl-kernel", "torch-memory-saver"),
    *(
        "flashinfer-python",
        "triton",
        "peft",
        "ray",
        "megatron-core",
        "transformer-engine",
        "tensordict",
        "safetensors",
    ),
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a part takes, in GiB. A part whose needs are not met is skipped with both numbers."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    sglang: bool = False
    megatron: bool = False

    def check(self, scratch: Path) -> None:
        """Raise ``Skip`` where this machine has less."""
        has = {
            "device memory": (self.device, device_gib()),
            "host memory": (self.host, host_gib()),
            "free disk": (self.disk, shutil.disk_usage(scratch).free / GIB),
        }
        for what, (needed, present) in has.items():
            if needed > present:
                raise Skip(f"needs {needed:.0f} GiB of {what}, this machine has {present:.0f}")
        if self.sglang and version_of("sglang") is None:
            raise Skip("needs sglang, which is not installed")
        if self.megatron and version_of("megatron-core") is None:
            raise Skip("needs megatron-core, which is not installed")


def device_gib() -> float:
    """Return the memory of the first GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    return torch.cuda.get_device_properties(0).total_memory / GIB


def host_gib() -> float:
    """Return the memory of this machine, or of the container if that is less.

    ``$GPU_BENCH_HOST_GIB`` (``--host-gib``) says it where the kernel does not: a virtual machine
    whose memory grows as it is used shows less than it will get.
    """
    if HOST_GIB in os.environ:
        return float(os.environ[HOST_GIB])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(total, int(text) / GIB) if text.isdigit() else total


def version_of(package: str) -> str | None:
    """Return the installed version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> dict[str, str]:
    """Name device, driver, host and versions, for the result's file."""
    found = {
        "host": f"{os.cpu_count()} CPUs, {host_gib():.0f} GiB, kernel {platform.release()}",
        "python": platform.python_version(),
        "device": "no CUDA device",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{torch.cuda.device_count()} x {properties.name}"
        found["device memory"] = f"{properties.total_memory / GIB:.1f} GiB"
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = str(torch.version.cuda)
        found["driver"] = _nvidia_smi("driver_version")
    found |= {name: version for name in _PACKAGES if (version := version_of(name))}
    return found


def commit_of(root: Path, given: str | None) -> str:
    """Return the commit that is measured: given where the sources travelled without git."""
    if given:
        return given
    try:
        head = _run(["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"])
        is_changed = bool(_run(["git", "-C", str(root), "status", "--porcelain"]))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if is_changed else "")


def _nvidia_smi(field: str) -> str:
    try:
        return _run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]).split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
