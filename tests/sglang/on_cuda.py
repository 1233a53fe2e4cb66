"""The rehearsal of a server's start as it would be on a machine with an H100: its child's stand-in.

``python -m tests.sglang.on_cuda CASE.json RESULT.json``: as ``sglang.child``, which does all but
the answers about the device. CASE.json may hold a list of cases, RESULT.json then as many results.
SGLang is imported first, on the CPU that there is, so that it looks for no kernels.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hybridrl.workers.rollout.sglang import child

MEMORY_MIB = 81_559
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=MEMORY_MIB * 2**20,
    multi_processor_count=132,
)
"""As torch and nvidia-smi tell them of one."""


def pretend() -> None:
    """Answer every question about the device as an H100 with CUDA 13 does."""
    child.load_server_args()
    for name in ("sglang.srt.entrypoints.engine", _SAVER):
        import_module(name)
    torch.version.cuda = "13.0"
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_device: (PROPERTIES.major, PROPERTIES.minor)
    cuda.get_device_name = lambda *_device: PROPERTIES.name
    cuda.get_device_properties = lambda *_device: PROPERTIES
    cuda.mem_get_info = lambda *_device: (PROPERTIES.total_memory, PROPERTIES.total_memory)
    common: Any = import_module("sglang.srt.utils.common")
    for value in vars(common).values():
        if type(value).__name__ == "_lru_cache_wrapper":
            value.cache_clear()
    common.get_nvgpu_memory_capacity = lambda: MEMORY_MIB
    common._get_device_sm_via_nvml = lambda: 90
    _install_memory_saver()


_SAVER = "sglang.srt.utils.torch_memory_saver_adapter"


def _install_memory_saver() -> None:
    """Stand in for torch_memory_saver 0.0.10, which says that it is enabled wherever it is."""
    package = ModuleType("torch_memory_saver")
    adapter: Any = import_module(_SAVER)
    adapter.torch_memory_saver = package
    adapter._memory_saver = SimpleNamespace(enabled=True)
    adapter.import_error = None


def rehearse(case: dict[str, Any]) -> Mapping[str, object]:
    """One of several, with the variables that a process of its own would have."""
    os.environ.update(case["variables"])
    return child.rehearse(case)


def main(case_file: Path, result_file: Path) -> None:
    pretend()
    cases = json.loads(case_file.read_text())
    if isinstance(cases, list):
        result_file.write_text(json.dumps([rehearse(case) for case in cases]))
        return
    child.check(case_file, result_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
