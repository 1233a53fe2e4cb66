"""Proof with a GPU: one command, in parts that can be chosen, without network.

    python benchmarks/gpu.py                   every part
    python benchmarks/gpu.py cycle_7b wake     these
    python benchmarks/gpu.py --dry             every part's code path on a CPU, tiny
    python benchmarks/gpu.py --list            parts, what they need and about how long they take
    python benchmarks/gpu.py --write-docs      keep the results and write docs/gpu-results.md

Each part is a process of its own, ended with all its children at its time limit, and writes one
JSON file; an error is a result too. Weights are random, of real sizes, made once on the machine.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(_ROOT)  # run as a script: this folder's modules are not top-level ones

from benchmarks.gpu_parts.bench import (  # noqa: E402
    FAILED,
    HOST_GIB,
    RUNNING,
    Bench,
    Part,
    Recorder,
    Result,
    Skip,
    commit_of,
    describe_machine,
    read_result,
    read_results,
)
from benchmarks.gpu_parts.page import summary, write_document  # noqa: E402
from benchmarks.gpu_parts.registry import PARTS  # noqa: E402
from hybridrl.processes.guard import kill_session  # noqa: E402

_DOCS = _ROOT / "docs" / "gpu-results.md"
_KEPT = _ROOT / "docs" / "gpu-results"
_GRACE_S = 20.0


def main() -> int:
    """Run the chosen parts one after the other; returns 1 if one failed."""
    options = _parse()
    if options.list:
        _list()
        return 0
    chosen = [part for part in PARTS if part.name in (options.parts or _names())]
    if options.here:
        return int(_run_here(chosen[0], options).status == FAILED)
    if not options.write_docs or options.parts:
        options.out.mkdir(parents=True, exist_ok=True)
        _run_all(chosen, options)
        print(summary(chosen, read_results(options.out)), flush=True)
    if options.write_docs:
        _keep(options.out)
        write_document(PARTS, _KEPT, _DOCS)
    results = read_results(options.out) if options.out.is_dir() else {}
    return int(any(result.status == FAILED for result in results.values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*_names(), []], metavar="PART")
    parser.add_argument("--dry", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--here", action="store_true", help="one part, within this process")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON files")
    parser.add_argument("--models", type=Path, default=None, help="folder of made models")
    parser.add_argument("--engine", choices=["sglang", "hf"], default=None)
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="for SGLang"
    )
    parser.add_argument("--limit-s", type=float, default=480.0, help="of one part")
    parser.add_argument("--total-s", type=float, default=None, help="start no part that ends later")
    parser.add_argument("--host-gib", type=float, default=None, help="where the kernel shows less")
    parser.add_argument("--commit", default=None, help="where the sources came without git")
    options = parser.parse_args()
    options.engine = options.engine or ("hf" if options.dry else "sglang")
    options.out = (options.out or _ROOT / "runs" / ("gpu_dry" if options.dry else "gpu")).resolve()
    options.models = (options.models or _ROOT / "runs" / "gpu_models").resolve()
    return options


def _names() -> list[str]:
    return [part.name for part in PARTS]


def _list() -> None:
    for part in PARTS:
        needs = part.needs
        print(
            f"{part.name:14} {part.about_s:4d} s  GPU {needs.device:.0f} GiB, host "
            f"{needs.host:.0f} GiB, disk {needs.disk:.0f} GiB  {part.title}"
        )


def _run_all(chosen: list[Part], options: argparse.Namespace) -> None:
    begin = time.monotonic()
    for part in chosen:
        left = None if options.total_s is None else options.total_s - (time.monotonic() - begin)
        if left is not None and left < min(part.about_s, options.limit_s):
            print(f"{part.name}: not started, {left:.0f} s are left", flush=True)
            continue
        limit_s = options.limit_s if left is None else min(options.limit_s, left)
        print(f"{part.name}: {part.title}", flush=True)
        _run(part, options, limit_s=limit_s)


def _run(part: Part, options: argparse.Namespace, *, limit_s: float) -> None:
    """Run one part; whatever happens to its process, there is a file afterwards."""
    path = options.out / f"{part.name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", part.name, "--here"]
    command += ["--out", str(options.out), "--models", str(options.models)]
    command += ["--engine", options.engine, *(["--dry"] if options.dry else [])]
    command += [f"--engine-arg={word}" for word in options.engine_arg]
    command += ["--commit", options.commit] if options.commit else []
    with (options.out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=_environment(options),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_S)
        kill_session(process)  # a server may not outlive its part on the device
        process.wait()
    ended = f"ended with exit code {process.returncode}"
    if process.returncode == -signal.SIGTERM or process.returncode == -signal.SIGKILL:
        ended = f"was ended at its limit of {limit_s:.0f} s"
    result = read_result(path) if path.is_file() else Result(part.name, is_dry=options.dry)
    if result.status == RUNNING:
        result.status = FAILED
        result.error = f"the process {ended}; the end of its log:\n" + _tail(options.out, part)
        Recorder(result, options.out).write()
    print(f"  {result.status} after {result.seconds:.0f} s {result.error[:300]}", flush=True)


def _run_here(part: Part, options: argparse.Namespace) -> Result:
    """Run a part; its file says how it went."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGTERM, _raise)
    result = Result(
        part.name,
        is_dry=options.dry,
        machine=describe_machine() | {"engine arguments": " ".join(options.engine_arg)},
        commit=commit_of(_ROOT, options.commit),
        date=datetime.date.today().isoformat(),
    )
    record = Recorder(result, options.out)
    options.models.mkdir(parents=True, exist_ok=True)
    with record.recording():
        on_cuda = torch.cuda.is_available() and not options.dry
        if not options.dry:
            if not on_cuda:
                raise Skip("there is no CUDA device; --dry runs the code path on a CPU")
            part.needs.check(options.models)
        bench = Bench(
            record=record,
            is_dry=options.dry,
            engine=options.engine,
            scratch=options.models,
            device=torch.device("cuda:0" if on_cuda else "cpu"),
            engine_args=tuple(options.engine_arg),
        )
        part.run(bench)
    return result


def _raise(number: int, frame: object) -> None:
    raise TimeoutError("the part was ended at its time limit")


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """The sources need not be installed: every process below finds them where they lie."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {} if options.host_gib is None else {HOST_GIB: str(options.host_gib)}
    return {**os.environ, **told, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _tail(out: Path, part: Part) -> str:
    return (out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")[-4000:]


def _keep(out: Path) -> None:
    """Take over the results of real runs; a dry one proves nothing about a GPU."""
    _KEPT.mkdir(exist_ok=True)
    for name, result in read_results(out).items() if out.is_dir() else ():
        if not result.is_dry:
            shutil.copyfile(out / f"{name}.json", _KEPT / f"{name}.json")


if __name__ == "__main__":
    sys.exit(main())
