"""What trace and metrics cost a step of the default run: at most 1 % of it.

One run on real workers, in which steps with and without the trace take turns, so that both meet the
same noise. On a busy machine their difference drowns in it; what counts is the time spent in
recording, taken by itself within the step.

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
from hybridrl.diagnostics.trace import SpanRecorder
from hybridrl.main import compose
from hybridrl.metrics import Metrics
from hybridrl.run.cluster import ray_cluster
from hybridrl.run.record import RunFolder, open_record
from hybridrl.run.run_folder import Sample
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


@dataclass(frozen=True)
class TimedRecord(RunFolder):
    """Records as usual, and notes how long each part of it takes; traces every other step."""

    times: Times = field(kw_only=True, default_factory=Times)

    @classmethod
    def around(cls, record: RunFolder) -> TimedRecord:
        """Take over a run's record."""
        return cls(**{one.name: getattr(record, one.name) for one in fields(record)})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep samples, and time it."""
        begin = time.perf_counter()
        super().samples(step, samples)
        self.times.samples_s = time.perf_counter() - begin

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep metrics and trace, and time each."""
        begin = time.perf_counter()
        values = self.run_log.log_step(step, metrics)
        logged = time.perf_counter()
        is_traced = step % 2 == 0
        if is_traced and self.tracing is not None:
            self.tracing.step(values)
        end = time.perf_counter()
        if step > _WARM_UP and self.times.ended:
            self.times.steps.append(
                {
                    "is_traced": is_traced,
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
    print_table(times.steps, *cost_per_span())


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
    return timed.times


def cost_per_span() -> tuple[float, float]:
    """Return the seconds that a span costs, and that fetching it from a rank's buffer costs."""
    recorder = SpanRecorder()
    costs: list[tuple[float, float]] = []
    for _ in range(_NUM_REPEATS):
        begin = time.thread_time()  # of the core: neighbours do not lengthen it
        for number in range(_NUM_SPANS):
            with recorder.span("stage", number=number):
                pass
        recorded = time.thread_time()
        recorder.take()
        taken = time.thread_time()
        costs.append(((recorded - begin) / _NUM_SPANS, (taken - recorded) / _NUM_SPANS))
    record_s, take_s = zip(*costs, strict=True)
    return statistics.median(record_s), statistics.median(take_s)


def print_table(steps: list[dict[str, float]], span_s: float, take_s: float) -> None:
    """Print medians of steps, means of costs: the trace does most of its work once a second."""
    traced = [step for step in steps if step["is_traced"]]
    plain = [step for step in steps if not step["is_traced"]]
    step_s = statistics.median(step["step_s"] for step in plain)
    metrics_s = statistics.fmean(step["metrics_s"] for step in steps)
    trace_s = statistics.fmean(step["trace_s"] for step in traced)
    print(f"{len(traced)} steps with trace and {len(plain)} without took turns\n")
    print("| what | ms | share of a step |\n|---|---:|---:|")
    rows = {
        "step without trace, median": step_s,
        "step with trace, median": statistics.median(step["step_s"] for step in traced),
        "metrics, TensorBoard and samples, on the driver": metrics_s,
        "trace, on the driver": trace_s,
    }
    for name, seconds in rows.items():
        print(f"| {name} | {1000 * seconds:.3f} | {seconds / step_s:.2%} |")
    print(f"\none span: {1e6 * span_s:.2f} µs to record, {1e6 * take_s:.2f} µs to hand over")
    share = (metrics_s + trace_s) / step_s
    print(f"trace + metrics: {share:.2%} of a step (limit {_LIMIT:.0%})")


if __name__ == "__main__":
    main()
