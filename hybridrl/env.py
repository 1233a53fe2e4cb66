"""The only module that reads or writes environment variables."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def get(name: str, default: str = "") -> str:
    """Return the variable, or ``default`` when it is unset."""
    return os.environ.get(name, default)


def set_default(name: str, value: str) -> None:
    """Set the variable unless the user already has."""
    os.environ.setdefault(name, value)


def set_value(name: str, value: str) -> None:
    """Set the variable for this process and its later children."""
    os.environ[name] = value


ROOT = Path(__file__).resolve().parents[1]
"""The folder of the package: a checkout, or the folder of installed packages."""

_PACKAGE = Path(__file__).resolve().parent
CONFIG_ROOT = _PACKAGE if (_PACKAGE / "hydra_configs").is_dir() else ROOT
"""The folder of hydra_configs and recipes: in a wheel inside the package, else beside it."""


def python_path() -> str:
    """Return a PYTHONPATH with which a process imports hybridrl from where this one does."""
    paths = get("PYTHONPATH").split(os.pathsep)
    return os.pathsep.join([str(ROOT), *(p for p in paths if p not in ("", str(ROOT)))])


def everything(*, but: Collection[str] = ()) -> dict[str, str]:
    """Return all variables for a child process, ``but`` those that it must not have."""
    return {name: value for name, value in os.environ.items() if name not in but}


def cache_dir() -> Path:
    """Return where made models are kept: ``$HYBRIDRL_CACHE`` or ``~/.cache/hybridrl``."""
    return Path(get("HYBRIDRL_CACHE") or Path.home() / ".cache" / "hybridrl")


def process_environment(num_threads: int) -> dict[str, str]:
    """Return the variables that every process needs *before* torch is imported.

    ``OMP_WAIT_POLICY=PASSIVE``: spinning OpenMP threads of two processes on two cores cost 8-9x.
    The two capacities bound the code and workspace that oneDNN and torch's layer above it keep for
    each size of a matrix. Micro-batches seldom have a size twice: with the usual 1024 the default
    run grew by 1 GiB in 100 steps, and was not faster.

    0 threads leave OpenMP's number to torch.
    """
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_worker_niceness": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
        "LRU_CACHE_CAPACITY": "32",
    }
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment
