"""The post-mortem of a crash: ``RUN_DIR/postmortem/TIME``.

``what.txt``            the error, the position of the run, ends of processes, a line per rank
``stacks.txt``          stacks of all threads, of the driver and of every rank
``log_tail.txt``        last lines of log.txt, and of each rank's output
``memory.csv``          memory of each rank over the last minutes
``versions.txt``        software and machine
``config.yaml``         the resolved configuration
``metrics_tail.jsonl``  the last steps

The folder appears complete or not at all, and no failure to write it hides the error.
"""

from __future__ import annotations

import faulthandler
import os
import platform
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import hybridrl
from hybridrl.atomic_io import free_name, rename_into_place
from hybridrl.checkpoint.fingerprint import processor_name
from hybridrl.diagnostics import activity
from hybridrl.diagnostics.process_report import RankReport, reports_on
from hybridrl.errors import (
    ConfigError,
    ConfigErrors,
    DataError,
    ModelError,
    ResourceError,
    RunFolderError,
    TrackerError,
    is_restartable,
)
from hybridrl.run.run_folder import CONFIG, LOG, METRICS

_MAX_FILE_CHARACTERS = 8 * 2**20
_TAIL_LINES = 200
_NUM_METRIC_LINES = 20
_PACKAGES = (
    *("torch", "ray", "transformers", "tensordict", "numpy", "peft", "safetensors"),
    *("sglang", "torch_memory_saver"),
)
_SELF_EXPLAINING = (
    ConfigError,
    ConfigErrors,
    DataError,
    ModelError,
    ResourceError,
    RunFolderError,
    TrackerError,
    SystemExit,
    GeneratorExit,
)


def is_crash(error: BaseException) -> bool:
    """Whether ``error`` needs a post-mortem: a refusal explains itself."""
    return not isinstance(error, _SELF_EXPLAINING)


def write_postmortem(
    run_folder: Path, error: BaseException, *, where: str, limit_s: float = 5.0
) -> str:
    """Write the folder, within ``limit_s`` seconds; return its path, or why it is missing.

    ``where`` is the step and phase of the run.
    """
    outcome = [f"not written, {run_folder} did not take it within {limit_s:g} s"]

    def attempt() -> None:
        try:
            outcome[0] = str(_write(run_folder, error, where))
        except OSError as failure:
            outcome[0] = f"not written, {failure}"

    # In a thread that may be left behind: a write to a lost disk never returns.
    thread = threading.Thread(target=attempt, daemon=True, name="post-mortem")
    thread.start()
    thread.join(limit_s)
    return outcome[0]


def _write(run_folder: Path, error: BaseException, where: str) -> Path:
    parent = run_folder / "postmortem"
    parent.mkdir(exist_ok=True)
    # Of this process alone: two that crash in one folder use different names.
    partial = parent / f".partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    ranks = reports_on(error)
    texts = {
        "what.txt": _describe(error, where, ranks),
        "stacks.txt": _sections(
            ("the driver, after the error was raised", _own_stacks()),
            *((rank.describe(), rank.stacks or "none\n") for rank in ranks),
        ),
        "log_tail.txt": _sections(
            (LOG, _tail(run_folder / LOG, _TAIL_LINES)),
            *((rank.describe(), rank.log_tail or "nothing\n") for rank in ranks),
        ),
        "memory.csv": _memory_table(ranks),
        "versions.txt": describe_versions(),
        CONFIG: _read(run_folder / CONFIG),
        "metrics_tail.jsonl": _tail(run_folder / METRICS, _NUM_METRIC_LINES),
    }
    try:
        for name, text in texts.items():
            shortened = text[:_MAX_FILE_CHARACTERS]
            (partial / name).write_text(shortened, encoding="utf-8", errors="replace")
        # A name may be taken: the clock may have been set back.
        target = free_name(parent / time.strftime("%Y-%m-%d_%H-%M-%S"))
        rename_into_place(partial, target)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _describe(error: BaseException, where: str, ranks: Sequence[RankReport]) -> str:
    lines = [
        *traceback.format_exception_only(error),
        f"\nwhere:       {where}",
        f"when:        {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
        f"driver:      pid {os.getpid()} on {socket.gethostname()}",
        f"restartable: {'yes' if is_restartable(error) else 'no'}",
        "\nranks, before they were stopped:",
        *(f"  {rank.describe()}" for rank in ranks),
        "\n",
    ]
    return "\n".join(lines) + "".join(traceback.format_exception(error))


def _sections(*titled_texts: tuple[str, str]) -> str:
    return "".join(f"==== {title}\n{text}\n" for title, text in titled_texts)


def _memory_table(ranks: Sequence[RankReport]) -> str:
    lines = ["process,host,seconds,resident_bytes,shared_memory_used_bytes"]
    lines += [f"driver,{socket.gethostname()},0.0,{activity.resident_bytes()},"]
    lines += [
        f"rank {rank.rank},{rank.host},{-age_s:.1f},{resident},{shared}"
        for rank in ranks
        for age_s, resident, shared in rank.memory
    ]
    return "\n".join(lines) + "\n"


def describe_versions() -> str:
    """Return a line for each package and machine property that results may depend on."""
    lines = [f"hybridrl {hybridrl.__version__}", f"python {sys.version.split()[0]}"]
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    lines += [
        f"platform {platform.platform()}",
        f"processor {processor_name()}, {os.cpu_count()} CPUs",
    ]
    driver = _read(Path("/proc/driver/nvidia/version")).splitlines()
    return "\n".join([*lines, *driver[:1]]) + "\n"


def _own_stacks() -> str:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, errors="replace") as reader, os.fdopen(write_end, "wb") as writer:
        os.set_blocking(write_end, False)  # past 64 KiB the other bytes are dropped
        faulthandler.dump_traceback(writer, all_threads=True)
        writer.close()
        return reader.read()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tail(path: Path, num_lines: int) -> str:
    return "".join(_read(path).splitlines(keepends=True)[-num_lines:])
