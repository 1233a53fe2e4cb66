"""One part in a process of its own: ``python -m benchmarks.gpu_parts.run_part NAME ...``."""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import logging
import signal
import sys
from pathlib import Path

import torch

from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.machine import commit_of, describe_machine
from benchmarks.gpu_parts.registry import PARTS
from benchmarks.gpu_parts.result import FAILED, Recorder, Result, Skip

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the part that the command line names; its file says how it went."""
    options = _parse()
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGTERM, _raise)
    part = next(part for part in PARTS if part.name == options.part)
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
        on_cuda = torch.cuda.is_available()
        if not options.dry:
            if not on_cuda:
                raise Skip("there is no CUDA device; --dry runs the code path on a CPU")
            part.needs.check(options.models)
        bench = Bench(
            record=record,
            is_dry=options.dry,
            engine=options.engine,
            scratch=options.models,
            device=torch.device("cuda:0" if on_cuda and not options.dry else "cpu"),
            engine_args=tuple(options.engine_arg),
        )
        part.run(bench)
    return int(result.status == FAILED)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--engine", choices=["sglang", "hf"], required=True)
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--commit", default=None)
    return parser.parse_args()


def _raise(number: int, frame: object) -> None:
    raise TimeoutError("the part was ended at its time limit")


if __name__ == "__main__":
    sys.exit(main())
