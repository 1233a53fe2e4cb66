"""What trace and metrics cost a step of the default run: at most 1 % of it.

One run on real workers. On a busy machine the difference of two runs drowns in noise; what counts
is the time spent in recording, taken by itself: on the driver within the step, and on a rank the
events that it wrote in a step times what an event costs.

    python -m benchmarks.overhead [--steps 60] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from benchmarks.sides.measure import print_head, print_row, seconds_of
from hybridrl import env
from hybridrl.config.load import load_config
from hybridrl.diagnostics import trace
from hybridrl.diagnostics.trace import SpanRecorder
from hybridrl.diagnostics.trace_file import FOLDER
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.record import RunFolder, open_record
from hybridrl.run.run_folder import SampleRow
from hybridrl.run.train import train

R = TypeVar("R", bound=RunFolder)

_LIMIT = 0.01
_WARM_UP = 5
_NUM_SPANS = 1_000
_NUM_REPEATS = 50


@dataclass
class Times:
    """What recording cost, step by step."""

    step_s: list[float] = field(default_factory=list)
    metrics_s: list[float] = field(default_factory=list)
    trace_s: list[float] = field(default_factory=list)
    ended: float = 0.0
    samples_s: float = 0.0


@dataclass(frozen=True)
class TimedRecord(RunFolder):
    """Records as usual, and notes how long each part of it takes."""

    times: Times = field(kw_only=True, default_factory=Times)

    def samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        keep = super().samples
        self.times.samples_s = seconds_of(lambda: keep(step, samples))

    def record(self, step: int, metrics: Metrics) -> None:
        begin = time.perf_counter()
        values = self.run_log.log_step(step, metrics)
        logged = time.perf_counter()
        trace.count(values)
        trace.process.write()
        end = time.perf_counter()
        if step > _WARM_UP and self.times.ended:
            self.times.step_s.append(end - self.times.ended)
            self.times.metrics_s.append(logged - begin + self.times.samples_s)
            self.times.trace_s.append(end - logged)
        self.times.ended = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        folder = Path(scratch) / "run"
        words = [f"trainer.num_steps={options.steps}", f"trainer.run_dir={folder}"]
        words += ["tracking.live=off", "eval.every_num_steps=0", "trainer.export_hf=false"]
        times = train_with(TimedRecord, [*words, *options.overrides]).times
        first_rank = min((folder / FOLDER).glob("rank 0 ActorRolloutWorker*.jsonl"))
        num_events = len(first_rank.read_bytes().splitlines()) / options.steps
        span_s, write_s = cost_per_span(Path(scratch))
    print_table(times, num_events=num_events, span_s=span_s, write_s=write_s)


def train_with(record_class: type[R], words: Sequence[str], **more: object) -> R:
    """Train as ``python -m hybridrl.main`` does, Ray and all; returns the record."""
    composed = compose(list(words))
    config = load_config(composed)
    for name, value in env.process_environment(config.cluster.num_threads_per_rank).items():
        env.set_default(name, value)
    kept: dict[str, Any]
    with (
        open_record(config, resolved_yaml=yaml.safe_dump(composed)) as opened,
        ray_cluster(config.cluster),
    ):
        kept = {one.name: getattr(opened, one.name) for one in fields(opened)} | more
        record = record_class(**kept)
        train(config, record=record)
    return record


def cost_per_span(folder: Path) -> tuple[float, float]:
    """Return the seconds that a span costs, and that writing it to the process's file costs."""
    recorder = SpanRecorder()
    recorder.write_to(folder, "benchmark", num_processes=1)
    costs: list[tuple[float, float]] = []
    with recorder.span("outermost"):  # nothing is written within it unless asked
        for _ in range(_NUM_REPEATS):
            begin = time.thread_time()  # of the core: neighbours do not lengthen it
            for number in range(_NUM_SPANS):
                with recorder.span("stage", number=number):
                    pass
            recorded = time.thread_time()
            recorder.write()
            written = time.thread_time()
            costs.append(((recorded - begin) / _NUM_SPANS, (written - recorded) / _NUM_SPANS))
    recorder.end()
    record_s, write_s = zip(*costs, strict=True)
    return statistics.median(record_s), statistics.median(write_s)


def print_table(times: Times, *, num_events: float, span_s: float, write_s: float) -> None:
    step_s = statistics.median(times.step_s)
    costs = {
        "metrics, TensorBoard and samples, on the driver": statistics.fmean(times.metrics_s),
        "trace, on the driver": statistics.fmean(times.trace_s),
        f"trace, on a rank: {num_events:.0f} events": num_events * (span_s + write_s),
    }
    print_head("what", "ms", "share of a step")
    for name, seconds in {"step, median": step_s, **costs}.items():
        print_row(name, f"{1000 * seconds:.3f}", f"{seconds / step_s:.2%}")
    print(f"\none span: {1e6 * span_s:.2f} µs to record, {1e6 * write_s:.2f} µs to write")
    print(f"trace + metrics: {sum(costs.values()) / step_s:.2%} of a step (limit {_LIMIT:.0%})")


if __name__ == "__main__":
    main()
