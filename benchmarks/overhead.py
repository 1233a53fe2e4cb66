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

import yaml

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

_LIMIT = 0.01
_WARM_UP = 5
_NUM_SPANS = 1_000
_NUM_REPEATS = 50


@dataclass
class Times:
    """What recording cost, step by step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    ended: float = 0.0
    samples_s: float = 0.0
    num_rank_events: int = 0
    """That the first rank wrote in all steps."""


@dataclass(frozen=True)
class TimedRecord(RunFolder):
    """Records as usual, and notes how long each part of it takes."""

    times: Times = field(kw_only=True, default_factory=Times)

    @classmethod
    def around(cls, record: RunFolder) -> TimedRecord:
        """Take over a run's record."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(record)})

    def samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Keep samples, and time it."""
        begin = time.perf_counter()
        super().samples(step, samples)
        self.times.samples_s = time.perf_counter() - begin

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep metrics and trace, and time each."""
        begin = time.perf_counter()
        values = self.run_log.log_step(step, metrics)
        logged = time.perf_counter()
        trace.count(values)
        trace.process.write()
        end = time.perf_counter()
        if step > _WARM_UP and self.times.ended:
            self.times.steps.append(
                {
                    "step_s": end - self.times.ended,
                    "metrics_s": logged - begin + self.times.samples_s,
                    "trace_s": end - logged,
                }
            )
        self.times.ended = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        times = run(options.steps, options.overrides, Path(folder) / "run")
        span_s, write_s = cost_per_span(Path(folder))
    print_table(times, num_steps=options.steps, span_s=span_s, write_s=write_s)


def run(num_steps: int, overrides: list[str], folder: Path) -> Times:
    """Train the default, or what the overrides make of it."""
    words = [f"trainer.num_steps={num_steps}", f"trainer.run_dir={folder}", "tracking.live=off"]
    composed = compose([*words, "eval.every_num_steps=0", "trainer.export_hf=false", *overrides])
    config = load_config(composed)
    for name, value in env.process_environment(config.cluster.num_threads_per_rank).items():
        env.set_default(name, value)
    with (
        open_record(config, resolved_yaml=yaml.safe_dump(composed)) as record,
        ray_cluster(config.cluster),
    ):
        timed = TimedRecord.around(record)
        train(config, record=timed)
    ranks = sorted((folder / FOLDER).glob("rank 0 ActorRolloutWorker*.jsonl"))
    timed.times.num_rank_events = len(ranks[0].read_bytes().splitlines())
    return timed.times


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


def print_table(times: Times, *, num_steps: int, span_s: float, write_s: float) -> None:
    """Print the median step, and the mean cost of each part."""
    step_s = statistics.median(step["step_s"] for step in times.steps)
    metrics_s = statistics.fmean(step["metrics_s"] for step in times.steps)
    trace_s = statistics.fmean(step["trace_s"] for step in times.steps)
    events_per_step = times.num_rank_events / num_steps
    rank_s = events_per_step * (span_s + write_s)
    print("| what | ms | share of a step |\n|---|---:|---:|")
    rows = {
        "step, median": step_s,
        "metrics, TensorBoard and samples, on the driver": metrics_s,
        "trace, on the driver": trace_s,
        f"trace, on a rank: {events_per_step:.0f} events": rank_s,
    }
    for name, seconds in rows.items():
        print(f"| {name} | {1000 * seconds:.3f} | {seconds / step_s:.2%} |")
    print(f"\none span: {1e6 * span_s:.2f} µs to record, {1e6 * write_s:.2f} µs to write")
    share = (metrics_s + trace_s + rank_s) / step_s
    print(f"trace + metrics: {share:.2%} of a step (limit {_LIMIT:.0%})")


if __name__ == "__main__":
    main()
