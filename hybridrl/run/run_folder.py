"""The run folder: a run writes its files to this folder alone.

``config.yaml``    the resolved configuration
``log.txt``        the log
``servers/``       the logs of the rollout manager and of the engines' processes
``metrics.jsonl``  one line a step
``samples.jsonl``  some responses of each step and evaluation: text, reward, log-probs of tokens
``rollouts/``      all columns of all rollouts, with ``rollout.dump=true``
``trace.json``     activities of driver and ranks, for ui.perfetto.dev; made of ``trace/``
``machine.json``   host, processor, memory and GPUs of the driver
``report.html``    a page about the run, made at the end or by ``python -m hybridrl.report FOLDER``
``postmortem/``    files of a crash, see ``run/record.py``
``tensorboard/``   the same metrics as events, if that tracker is on
``checkpoints/``   see ``hybridrl/checkpoint``
"""

from __future__ import annotations

import logging
import math
import os
import reprlib
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from io import SEEK_END, FileIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, Literal, Self

from filelock import FileLock, Timeout

from hybridrl.algorithms.load import Part, load_by_name
from hybridrl.atomic_io import atomic_write_text, free_name
from hybridrl.config.functions.parts import METRICS_FUNCTION
from hybridrl.config.trainer import TrackingConfig
from hybridrl.errors import RunFolderError, TrackerError, TrainingError
from hybridrl.json_text import to_json_text
from hybridrl.metrics import Metrics, check_declared
from hybridrl.report.run import parse_metrics, read_lines
from hybridrl.run.tracker_thread import TrackerThread
from hybridrl.run.trackers import start_tracker

if TYPE_CHECKING:  # it imports torch, which the parent of a driver must not
    from hybridrl.agents.trajectory import CallRecord

log = logging.getLogger(__name__)

CONFIG, SAMPLES, LOG = "config.yaml", "samples.jsonl", "log.txt"
"""Files of a run folder."""

_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One turn of a conversation."""

    role: str
    """``assistant``: the policy wrote it, and learns from it. ``tool`` or ``user``: an agent
    appended it. ``history``: the earlier turns, rendered again. ``environment``: other tokens."""

    text: str
    """With special tokens."""

    num_tokens: int

    calls: tuple[CallRecord, ...] = ()
    """Calls of tools behind a turn of the assistant; empty ones are not written."""

    reward: float | None = None
    """That the agent gave the turn; not written if it gave none in the conversation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One response as ``samples.jsonl`` shows it."""

    prompt: str
    response: str
    answer: str
    reward: float
    is_truncated: bool
    split: Literal["train", "eval"] = "train"
    """Whether it was sampled for training, or for a held-out prompt."""

    eval_set: str = ""
    """Name of the evaluation set of ``eval.sets``; empty ones are not written."""

    tokens: tuple[str, ...] = ()
    """Text of each sampled token, special ones too; at most the first 512."""

    logprobs: tuple[float, ...] = ()
    """Log-probs of those tokens, nats, by the sampler, to 3 decimals."""

    turns: tuple[SampleTurn, ...] = ()
    """Turns behind the prompt of a conversation; empty, and not written, for a single turn."""

    images: tuple[str, ...] = ()
    """Small copies of what the model saw, ``data:`` URLs of PNG files; not written without any."""


class RunLogger:
    """Owns a run folder and the trackers; close it, or use it in a ``with``.

    Where the disk is full or gone, what writes raises RunFolderError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        overwrite: bool,
        resumes: bool = False,
        resolved_yaml: str,
        settings: Mapping[str, object],
        config: TrackingConfig,
    ) -> None:
        """Create the folder, or open the folder of a run that continues, and start the trackers.

        Args:
            folder: new, empty, or with ``overwrite`` a former run folder, which is deleted.
            resumes: the folder's run continues; call `rewind` before the first step.
            settings: the same configuration as a mapping, for trackers that show it.

        Raises:
            RunFolderError: it exists, it is not a run folder though ``overwrite`` is given, another
                process writes it, or it cannot be written.
            TrackerError: a tracker does not start.
        """
        self.folder = folder
        self._config = config
        self._began = time.monotonic()
        self._trackers: list[TrackerThread] = []
        self._function: Part | None = None
        if config.function is not None:
            self._function = load_by_name(METRICS_FUNCTION, config.function, {})
        with ExitStack() as opened, _naming(folder):
            opened.enter_context(_lock(folder))
            if not resumes:
                opened.enter_context(_new_run(folder, overwrite=overwrite))
            atomic_write_text(folder / CONFIG, resolved_yaml)
            # Unbuffered: a line reaches the system before the next step begins.
            self._metrics = opened.enter_context((folder / METRICS).open("a+b", buffering=0))
            self._samples = opened.enter_context((folder / SAMPLES).open("a+b", buffering=0))
            for name in config.trackers:
                start = partial(start_tracker, name, folder, config, settings)
                tracker = TrackerThread(name, start)
                opened.callback(tracker.close)
                self._trackers.append(tracker)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken, over all its processes."""
        return time.monotonic() - self._began

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file that grows by lines, for `rewind`.

        The bytes are on the disk then: a checkpoint may not outlive the lines before it.
        """
        files = {METRICS: self._metrics, SAMPLES: self._samples}
        with _naming(self.folder):
            for file in files.values():
                os.fsync(file.fileno())
        return {name: file.seek(0, SEEK_END) for name, file in files.items()}

    def rewind(self, step: int, *, sizes: Mapping[str, int], elapsed_s: float) -> None:
        """Return to the state of a checkpoint: later lines will be written again.

        A file that is shorter than at the checkpoint keeps its complete lines; the log names it.

        Step 0 is before the first. ``sizes`` is the result of `sizes` at the checkpoint; a file
        without an entry is emptied.
        """
        self._began = time.monotonic() - elapsed_s
        with _naming(self.folder):
            for lost in lost_lines(self.folder, sizes):
                log.warning("lines before step %d are lost: %s", step + 1, lost)
            for name, file in ((METRICS, self._metrics), (SAMPLES, self._samples)):
                file.truncate(whole_lines(file, sizes.get(name, 0)))
        for tracker in self._trackers:
            tracker.rewind(step)

    def log_step(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Write one step's metrics everywhere.

        A value that is not finite is ``null`` in the file, and trackers do not get it.

        Raises:
            MetricError: a name that ``hybridrl/metrics.py`` does not declare.
            RunFolderError: also if the folder was deleted.
            TrainingError: ``tracking.function`` raised, or returned something else than a bool.
        """
        check_declared(metrics)
        values = {name: metric.value for name, metric in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, "elapsed_s": round(self.elapsed_s, 3)}
        path = self.folder / METRICS
        with _naming(self.folder):
            # Writing to an open file of a deleted folder never fails.
            if not path.exists() or not os.path.samefile(path, self._metrics.fileno()):
                raise RunFolderError(
                    f"run folder {self.folder} was deleted, moved or replaced while the run wrote "
                    f"it: {METRICS} is not the file that was opened; nothing more can be kept. "
                    "Give the command again, and leave the folder where it is"
                )
            _append(self._metrics, line | {name: finite.get(name) for name in values})
        for tracker in () if self._is_taken(step, finite) else self._trackers:
            tracker.log(step, finite)
        return values

    def _is_taken(self, step: int, finite: Mapping[str, float]) -> bool:
        """Call the user's function; True if trackers shall not get the step."""
        if self._function is None:
            return False
        answer = self._function(step=step, metrics=MappingProxyType(finite))
        if answer is None or isinstance(answer, bool):
            return bool(answer)
        raise TrainingError(
            f"{self._function.key}={self._function.spelled} returned {reprlib.repr(answer)}; "
            "return True to keep the step from the trackers, else nothing"
        )

    def log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        """Write the first ``tracking.num_samples_per_step`` of ``samples``, compactly."""
        with _naming(self.folder):
            for sample in samples[: self._config.num_samples_per_step]:
                values = asdict(sample)
                for turn in values["turns"]:
                    _drop_empty(turn, ("calls", "reward"))
                _drop_empty(values, ("eval_set", "turns", "images"))
                _append(self._samples, {"step": step} | values)

    def log_error(self, error: BaseException) -> None:
        """Write the end of the run to the log alone; a disk that refuses is not a second error."""
        with suppress(OSError), (self.folder / LOG).open("a", encoding="utf-8") as file:
            text = "".join(traceback.format_exception(error))
            file.write(f"the run ended with an error\n{text}")

    def close(self) -> None:
        """End the trackers and close the files. Twice is a no-op."""
        self._opened.close()


def _drop_empty(values: dict[str, object], names: Sequence[str]) -> None:
    for name in names:
        if values[name] in ((), "", None):
            del values[name]


def _append(file: FileIO, record: Mapping[str, object]) -> None:
    """Write a complete line or nothing."""
    data = to_json_text(record, keeps_unicode=True).encode(errors="replace") + b"\n"
    end = file.seek(0, SEEK_END)
    if file.write(data) != len(data):  # an unbuffered file may write fewer bytes
        file.truncate(end)
        raise OSError("no space left on the disk")


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the folder and the remedy."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"cannot write run folder {folder}: {error}; free space there, or set trainer.run_dir "
            "to a folder that can be written"
        ) from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder; the lock ends with this process, however it ends."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds data of the user's
    try:
        held = FileLock(folder / _LOCK).acquire(timeout=0)
    except Timeout as err:
        raise RunFolderError(
            f"another process is writing run folder {folder}; wait for it, end it, or set "
            f"trainer.run_dir={free_name(folder)}"
        ) from err
    with held:
        yield


@contextmanager
def _new_run(folder: Path, *, overwrite: bool) -> Iterator[None]:
    """Empty the folder; if a tracker refuses the run, the next try can have it."""
    is_empty = all(path.name == _LOCK for path in folder.iterdir())
    if not is_empty and not overwrite:
        raise RunFolderError(
            f"run folder {folder} exists; set trainer.run_dir={free_name(folder)}, or "
            "trainer.overwrite=true to replace it"
        )
    if not is_empty and not all((folder / name).exists() for name in (CONFIG, METRICS)):
        raise RunFolderError(
            f"{folder} holds files, but no {CONFIG} and {METRICS}: it is no run folder "
            f"and will not be replaced; set trainer.run_dir={free_name(folder)}"
        )
    _clear(folder)
    try:
        yield
    except TrackerError:
        _clear(folder)  # other trackers have ended by now
        raise


def _clear(folder: Path) -> None:
    """Delete all but the lock."""
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


METRICS = "metrics.jsonl"
"""Name in the run folder."""


def read_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Return the complete lines of ``metrics.jsonl``, without values that are not finite.

    A run that was killed may leave half a line, without its newline.
    """
    with suppress(OSError):
        lines = (line for line in read_lines(run_folder / METRICS) if line.endswith(b"\n"))
        rows = [row for line in lines if (row := parse_metrics(line)) is not None]
        return [{name: value for name, value in row.items() if value is not None} for row in rows]
    return []


def last_step(run_folder: Path) -> int:
    """Return the last step in ``metrics.jsonl``; 0 if there is none."""
    rows = read_metrics(run_folder)
    return int(rows[-1]["step"]) if rows else 0


def whole_lines(file: BinaryIO, size: int) -> int:
    """Return the bytes of all complete lines among the first ``size`` bytes of a file."""
    end = min(size, file.seek(0, SEEK_END))
    while end > 0:
        begin = max(0, end - (1 << 16))
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def lost_lines(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Name the files of ``folder`` that lack lines which a checkpoint counts on.

    ``sizes`` are the bytes of each file at the checkpoint: after complete lines.
    """
    lost = []
    for name, size in sizes.items():
        try:
            with (folder / name).open("rb") as file:
                num_bytes = file.seek(0, SEEK_END)
                is_there = whole_lines(file, size) == size
        except FileNotFoundError:
            num_bytes, is_there = 0, size == 0
        if not is_there:
            lost.append(f"{name} has {num_bytes} bytes, and no line ends after {size}")
    return lost
