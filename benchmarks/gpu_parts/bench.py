"""What a part is given and gives: the machine, a size, and a result that is on the disk at once."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.shapes import ensure_model
from hybridrl.atomic_io import atomic_write_text

GIB = 2**30
MIB = 2**20
HOST_GIB = "GPU_BENCH_HOST_GIB"
PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"
_PACKAGES = (
    *("torch", "transformers", "sglang", "sglang-kernel", "sgl-kernel", "torch-memory-saver"),
    *("flashinfer-python", "triton", "peft", "ray", "megatron-core", "transformer-engine"),
    *("tensordict", "safetensors"),
)


class Skip(Exception):
    """This machine, or this run, cannot show what the part is about; the text says why."""


@dataclass(slots=True)
class Result:
    """One part's JSON file."""

    part: str
    is_dry: bool
    status: str = RUNNING
    error: str = ""
    """Why it failed or was skipped."""

    figures: dict[str, list[Any]] = field(default_factory=dict)
    """Value and unit by name. Unit ``1`` counts, ``yes`` says whether (1 or 0)."""

    notes: list[str] = field(default_factory=list)
    not_exercised: list[str] = field(default_factory=list)
    """What a dry run could not reach."""

    machine: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    seconds: float = 0.0


class Recorder:
    """Keeps one ``Result`` on the disk up to date: a part that dies leaves what it had."""

    def __init__(self, result: Result, folder: Path) -> None:
        self.result = result
        self.path = folder / f"{result.part}.json"
        folder.mkdir(parents=True, exist_ok=True)

    def figure(self, name: str, value: float, unit: str) -> None:
        """Keep one number; what is not finite is kept as text, JSON has no such number."""
        self.result.figures[name] = [value if math.isfinite(value) else str(value), unit]
        self.write()

    def figures(self, values: Mapping[str, float], unit: str) -> None:
        for name, value in values.items():
            self.figure(name, value, unit)

    def note(self, text: str) -> None:
        """Keep what a number does not say."""
        self.result.notes.append(text)
        self.write()

    def not_exercised(self, text: str) -> None:
        """Say what a dry run left out."""
        self.result.not_exercised.append(text)
        self.write()

    def write(self) -> None:
        atomic_write_text(self.path, json.dumps(asdict(self.result), indent=1) + "\n")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a part: its end, a skip or an error becomes the result, and nothing is raised."""
        begin = time.monotonic()
        self.write()
        try:
            yield
            self.result.status = PASSED
        except Skip as err:
            self.result.status, self.result.error = SKIPPED, str(err)
        except BaseException as err:
            self.result.status = FAILED
            lines = traceback.format_exception(err)
            self.result.error = f"{type(err).__name__}: {err}\n" + "".join(lines)[-6000:]
            if not isinstance(err, Exception):
                raise
        finally:
            self.result.seconds = round(time.monotonic() - begin, 1)
            self.write()


def read_result(path: Path) -> Result:
    return Result(**json.loads(path.read_text(encoding="utf-8")))


def read_results(folder: Path) -> dict[str, Result]:
    """Read every part's file of a folder, by part."""
    results = [read_result(path) for path in sorted(folder.glob("*.json"))]
    return {result.part: result for result in results}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a part takes, in GiB. A part whose needs are not met is skipped with both numbers."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    package: str | None = None

    def check(self, scratch: Path) -> None:
        has = {
            "device memory": (self.device, device_gib()),
            "host memory": (self.host, host_gib()),
            "free disk": (self.disk, shutil.disk_usage(scratch).free / GIB),
        }
        for what, (needed, present) in has.items():
            if needed > present:
                raise Skip(f"needs {needed:.0f} GiB of {what}, this machine has {present:.0f}")
        if self.package is not None and version_of(self.package) is None:
            raise Skip(f"needs {self.package}, which is not installed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One run of one part."""

    record: Recorder
    is_dry: bool

    engine: str
    """The rollout engine: ``sglang``, or ``hf`` where a dry run does without."""

    scratch: Path
    """Keeps made models between parts."""

    device: torch.device

    engine_args: tuple[str, ...] = ()
    """``key=value`` for ``rollout.engine_args``: what this machine's SGLang needs."""

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self, shape: str) -> Path:
        """Return a folder of random weights of that shape; in a dry run of a tiny one."""
        return ensure_model("tiny" if self.is_dry else shape, self.scratch, device=self.device)

    def size(self, real: int, *, dry: int) -> int:
        """Return a count: the real one, or a small one in a dry run."""
        return dry if self.is_dry else real


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of the registry."""

    name: str
    title: str
    """What it shows, for the table."""

    run: Callable[[Bench], None]
    about_s: int
    """Expected seconds on a large GPU; a guess until it ran there."""

    needs: Needs = field(default_factory=Needs)


def device_gib() -> float:
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
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = _output_of(*query).split("\n")[0]
    found |= {name: version for name in _PACKAGES if (version := version_of(name))}
    return found


def commit_of(root: Path, given: str | None) -> str:
    """Return the commit that is measured: given where the sources travelled without git."""
    git = ("git", "-C", str(root))
    head = given or _output_of(*git, "rev-parse", "--short=10", "HEAD")
    if given or head == "unknown" or not _output_of(*git, "status", "--porcelain"):
        return head
    return f"{head} with changes"


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
