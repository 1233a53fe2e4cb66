"""Everything that a run writes and shows: its folder, its trackers, its live view, its end.

A crash leaves a post-mortem, ``RUN_DIR/postmortem/TIME``:

``what.txt``            the error, the position of the run, ends of processes, a line per rank
``stacks.txt``          stacks of all threads, of the driver and of every rank
``log_tail.txt``        last lines of log.txt, and of each rank's output
``memory.csv``          memory of each rank over the last minutes
``versions.txt``        software and machine
``config.yaml``         the resolved configuration
``metrics_tail.jsonl``  the last steps

It appears complete or not at all, and no failure to write it hides the error.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import shlex
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import fmean

import hybridrl
from hybridrl import log
from hybridrl.atomic_io import free_name, rename_into_place
from hybridrl.checkpoint.fingerprint import processor_name
from hybridrl.checkpoint.store import CheckpointStore, RunState
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.diagnostics import activity, trace
from hybridrl.diagnostics.process_report import RankReport, reports_on
from hybridrl.diagnostics.trace_file import join_traces
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
from hybridrl.metrics import Metrics, format_duration, format_value
from hybridrl.report.page import try_machine, try_report
from hybridrl.report.run import SCORES, History, Series
from hybridrl.run.display import LiveView, open_live
from hybridrl.run.run_folder import (
    CONFIG,
    LOG,
    METRICS,
    RunLogger,
    SampleRow,
    last_step,
    read_metrics,
)
from hybridrl.trainer.interrupt import RunStopped

_logger = logging.getLogger(__name__)
_COUNTED = ("reward/mean", "eval/reward/mean", "policy/entropy_nats/mean")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The ``Recorder`` of a run."""

    run_log: RunLogger
    live: LiveView

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_log.folder

    def record(self, step: int, metrics: Metrics) -> None:
        """Keep and show the metrics of one step."""
        values = self.run_log.log_step(step, metrics)
        self.live.step(step, values)
        counted = {
            name: value
            for name, value in values.items()
            if name in _COUNTED or name.startswith(("throughput/", "memory/"))
        }
        trace.count(counted)

    def rewind(self, run: RunState | None) -> None:
        """Return to the state of a checkpoint; None is before the first step."""
        step = 0 if run is None else run.step
        if (last := last_step(self.folder)) > step:
            _logger.warning("steps %d to %d are done again; their lines go", step + 1, last)
        sizes, elapsed_s = ({}, 0.0) if run is None else (run.log_sizes, run.elapsed_s)
        self.run_log.rewind(step, sizes=sizes, elapsed_s=elapsed_s)
        self.live.rewind(step, read_metrics(self.folder))

    def samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Keep some responses of a step."""
        self.run_log.log_samples(step, samples)

    def explain(self, error: BaseException) -> None:
        """Note on ``error`` the position of the run, and write the post-mortem folder of a crash.

        Once for each error: by the code that survives it, or at the end of the run. Takes at most
        5 s and raises nothing, whatever the state of the disk.
        """
        where = self.live.describe_place()
        error.add_note(where)
        self.live.break_off()
        # A user who stops a start knows why; one who stops a step may have waited in vain.
        is_wanted = isinstance(error, KeyboardInterrupt) and not self.live.has_begun
        if not is_wanted and not isinstance(error, _SELF_EXPLAINING):
            outcome = write_postmortem(self.folder, error, where=where)
            error.add_note(f"post-mortem: {outcome}")


@contextmanager
def open_record(
    config: ExperimentConfig,
    *,
    resolved_yaml: str,
    resumes: bool = False,
    command: Sequence[str] = (),
) -> Iterator[RunFolder]:
    """Make or open the run folder, begin the log and the live view, and end them all.

    With ``resumes`` the run in the folder continues. The last lines show how to continue with the
    ``command`` that started it.
    """
    run_log = RunLogger(
        Path(config.trainer.run_dir),
        overwrite=config.trainer.overwrite,
        resumes=resumes,
        resolved_yaml=resolved_yaml,
        settings=asdict(config),
        config=config.tracking,
    )
    with run_log:
        log.configure(file=run_log.folder / LOG)
        try_machine(run_log.folder)
        with (
            _summarized(config, command),
            _traced(run_log.folder),
            open_live(config.tracking.live, num_steps=config.num_steps, stream=sys.stdout) as live,
        ):
            record = RunFolder(run_log, live)
            if resumes:
                live.num_done = last_step(run_log.folder)
            try:
                yield record
            except RunStopped:  # on request, and after a log line: not an error
                raise
            except BaseException as error:
                record.explain(error)
                run_log.log_error(error)  # to the file alone: the catcher of the error shows it
                raise


@contextmanager
def _summarized(config: ExperimentConfig, command: Sequence[str]) -> Iterator[None]:
    """Make the report and show the summary, however the run ends."""
    ending: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ending = error
        raise
    finally:
        folder = Path(config.trainer.run_dir)
        _logger.info("run folder: %s", folder)
        if config.mode != "eval":  # which prints a table of its own
            try_report(folder)
            if config.tracking.live != "off":
                text = describe_end(config, command=command, error=ending)
                with suppress(BrokenPipeError):  # as after `| head`
                    sys.stdout.write(text)
                    sys.stdout.flush()


@contextmanager
def _traced(folder: Path) -> Iterator[None]:
    """Let this process, and ranks that it starts, write the trace of a run; join it at the end."""
    begins = trace.process.write_to(
        folder.absolute(), f"driver on {socket.gethostname()}", num_processes=4
    )
    try:
        if begins:
            join_traces(folder)  # after a driver was killed
        yield
    finally:
        trace.process.end()
        if begins:
            join_traces(folder)


_OF_CONVERSATIONS: Sequence[tuple[str, Callable[[Sequence[float]], float]]] = (
    ("agent/turns/mean", max),
    ("agent/tool_error_fraction", min),
)


def describe_end(
    config: ExperimentConfig, *, command: Sequence[str], error: BaseException | None
) -> str:
    """Return some lines about a run that ended; ``error`` is the reason for an early end."""
    folder = Path(config.trainer.run_dir)
    history = History(read_metrics(folder))
    num_done = history.steps[-1] if history.steps else 0
    seconds = f", {format_duration(history.elapsed_s[-1] or 0)}" if history.steps else ""
    verb = "finished" if error is None else "stopped"
    where = f"after step {num_done}" if num_done else "before step 1"
    epochs = config.trainer.num_epochs
    num_steps = config.num_steps if error or epochs is None else num_done  # epochs ended it
    rows = [(verb, f"{where} of {num_steps}{seconds}")]
    for name, best in (*SCORES, *_OF_CONVERSATIONS):
        if len(history.get(name).finite) > 1:
            rows.append((name, _describe_score(history.get(name), name, best)))
    store = CheckpointStore(folder / "checkpoints")
    steps = store.steps()
    places = {
        "model": folder / "hf",
        "adapter": folder / "adapter",
        "report": folder / "report.html",
        "checkpoint": store.folder_of(max(steps, default=0)),
    }
    rows += [(label, str(path)) for label, path in places.items() if path.exists()]
    if command and steps:  # without a checkpoint nothing is continued
        longer = [f"trainer.num_steps={2 * config.num_steps}"]
        longer += [] if epochs is None else [f"trainer.num_epochs={2 * epochs:g}"]
        more = [] if error else longer
        rows.append(("to continue", resume_command(command, run_dir=str(folder), changes=more)))
    return "".join(f"{label:<20} {text}\n" for label, text in rows)


def resume_command(command: Sequence[str], *, run_dir: str, changes: Sequence[str]) -> str:
    """Return the ``command`` that continues its run, quoted; ``changes`` replace overrides."""
    given = (f"trainer.run_dir={run_dir}", *changes)
    replaced = {"trainer.overwrite", *(override.partition("=")[0] for override in given)}
    kept = [part for part in command if part.partition("=")[0] not in replaced]
    return shlex.join([*kept, *given])


def _describe_score(series: Series, name: str, best_of: Callable[[Sequence[float]], float]) -> str:
    """Return the first and last value of a metric."""
    values = series.finite
    if not name.startswith("eval/"):
        num = min(10, len(values) // 2)
        first, last = format_value(fmean(values[:num])), format_value(fmean(values[-num:]))
        spans = f"means of {num} steps" if num > 1 else "first and last step"
        return f"{first} -> {last} ({spans})"
    best, step = series.best(best_of)
    ends = f"{format_value(values[0])} -> {format_value(values[-1])}"
    return f"{ends}, best {format_value(best)} after step {step}"


_TAIL_LINES = 200
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
        "metrics_tail.jsonl": _tail(run_folder / METRICS, 20),
    }
    try:
        for name, text in texts.items():
            shortened = text[: 8 * 2**20]
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
