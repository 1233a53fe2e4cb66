"""The run folder: the one place that a run writes to.

``config.yaml``    the resolved configuration
``log.txt``        the log
``metrics.jsonl``  one line a step
``samples.jsonl``  some responses of each step and evaluation: text, reward, log-probs of tokens
``trace.json``     what driver and ranks did when, for ui.perfetto.dev
``report.html``    all of it to look at, made at the end or by ``python -m hybridrl.report FOLDER``
``tensorboard/``   the same metrics as events, if that tracker is on
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import SEEK_END, FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from hybridrl.config.tracking import TrackingConfig
from hybridrl.errors import RunFolderError
from hybridrl.metrics import Metrics, check_declared

_CONFIG, _METRICS, _SAMPLES, _LOG = "config.yaml", "metrics.jsonl", "samples.jsonl", "log.txt"


class Tracker(Protocol):
    """Where metrics go besides the run folder; see ``trainer/trackers``."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the finite metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response as ``samples.jsonl`` shows it."""

    prompt: str
    response: str
    answer: str
    reward: float
    is_truncated: bool
    split: Literal["train", "eval"] = "train"
    """Whether it was sampled to learn from, or on a held-out prompt."""

    tokens: tuple[str, ...] = ()
    """Text of each sampled token, special ones too; at most the first 512."""

    logprobs: tuple[float, ...] = ()
    """Of those tokens, nats, by the sampler, to 3 decimals."""


class RunLog:
    """Owns a run folder and the trackers; close it, or use it in a ``with``."""

    def __init__(
        self,
        folder: Path,
        *,
        overwrite: bool,
        resolved_yaml: str,
        settings: Mapping[str, object],
        config: TrackingConfig,
    ) -> None:
        """Create the folder and start the trackers.

        Args:
            folder: new, empty, or with ``overwrite`` a former run folder, which is deleted.
            overwrite: ``trainer.overwrite``.
            resolved_yaml: text of ``config.yaml``.
            settings: the same configuration as a mapping, for trackers that show it.
            config: the tracking section.

        Raises:
            RunFolderError: it exists, it is no run folder though ``overwrite`` is given, or it
                cannot be written.
            ImportError: a tracker is not installed; says how to.
        """
        self.folder = folder
        self._config = config
        self._began = time.monotonic()
        self._trackers: list[Tracker] = []
        # Before the folder: a run that could not begin must not leave one that is in its own way.
        modules = [
            importlib.import_module(f"hybridrl.trainer.trackers.{name}") for name in config.trackers
        ]
        with ExitStack() as opened, _naming(folder):
            _make_folder(folder, overwrite=overwrite)
            (folder / _CONFIG).write_text(resolved_yaml, encoding="utf-8")
            # Unbuffered: a line is on its way to the disk before the next step begins.
            self._metrics = opened.enter_context((folder / _METRICS).open("ab", buffering=0))
            self._samples = opened.enter_context((folder / _SAMPLES).open("ab", buffering=0))
            for module in modules:
                tracker = module.open_tracker(folder, project=config.project, settings=settings)
                opened.callback(tracker.close)
                self._trackers.append(tracker)
            self._opened = opened.pop_all()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def log_file(self) -> Path:
        """Where ``log.configure(file=...)`` is to write."""
        return self.folder / _LOG

    def log_step(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Write one step's metrics everywhere.

        A value that is not finite is ``null`` in the file, and is not sent to trackers.

        Returns:
            Each metric's value.

        Raises:
            MetricError: a name that ``hybridrl/metrics.py`` does not declare.
            RunFolderError: the disk is full or gone.
        """
        check_declared(metrics)
        values = {name: metric.value for name, metric in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, "elapsed_s": round(time.monotonic() - self._began, 3)}
        with _naming(self.folder):
            _append(self._metrics, line | {name: finite.get(name) for name in values})
            for tracker in self._trackers:
                tracker.log(step, finite)
        return values

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the first ``tracking.num_samples_per_step`` of ``samples``, compactly.

        Raises:
            RunFolderError: the disk is full or gone.
        """
        with _naming(self.folder):
            for sample in samples[: self._config.num_samples_per_step]:
                _append(self._samples, {"step": step} | asdict(sample))

    def close(self) -> None:
        """End the trackers and close the files. Twice is a no-op."""
        self._opened.close()


def _append(file: FileIO, record: Mapping[str, object]) -> None:
    """Write a line whole or not at all."""
    data = json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
    end = file.seek(0, SEEK_END)
    if file.write(data) != len(data):  # an unbuffered file may take a part of it
        file.truncate(end)
        raise OSError("no space left on the disk")


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn what the operating system says into an error that names the folder and the remedy."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"cannot write run folder {folder}: {error}; free space there, or set trainer.run_dir "
            "to a folder that can be written"
        ) from error


def _make_folder(folder: Path, *, overwrite: bool) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise RunFolderError(
                f"run folder {folder} exists; set trainer.run_dir={_free_name(folder)}, or "
                "trainer.overwrite=true to replace it"
            )
        if not all((folder / name).exists() for name in (_CONFIG, _METRICS)):
            raise RunFolderError(
                f"{folder} holds files, but no {_CONFIG} and {_METRICS}: it is no run folder "
                f"and will not be replaced; set trainer.run_dir={_free_name(folder)}"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def _free_name(folder: Path) -> Path:
    number = 2
    while (free := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return free
