from __future__ import annotations

import itertools
import json
import logging
import math
import os
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from hybridrl import log
from hybridrl.config.trainer import TRACKER_MODULES, TrackingConfig
from hybridrl.diagnostics.trace import SpanRecorder
from hybridrl.errors import MetricError, RunFolderError, TrackerError, TrainingError
from hybridrl.metrics import Max, Mean
from hybridrl.run import tracker_thread
from hybridrl.run.run_folder import RunLogger, SampleRow
from hybridrl.run.trackers import TRACKERS, TensorBoardTracker

ROOT = Path(__file__).parents[2]


def open_log(
    folder: Path,
    *,
    overwrite: bool = False,
    resumes: bool = False,
    trackers: tuple[str, ...] = ("tensorboard",),
    function: str | None = None,
) -> RunLogger:
    return RunLogger(
        folder,
        overwrite=overwrite,
        resumes=resumes,
        resolved_yaml="seed: 7\n",
        settings={"seed": 7, "actor": {"optimizer": {"lr": 3e-5}}},
        config=tracking(trackers, function),
    )


def tracking(trackers: tuple[str, ...] = (), function: str | None = None) -> TrackingConfig:
    return TrackingConfig(
        trackers=trackers,  # type: ignore[arg-type]
        project="test",
        prometheus_address=f"127.0.0.1:{os.environ.get('TEST_PORT', 0)}",
        function=function,
        num_samples_per_step=2,
        live="off",
    )


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sample(text: str) -> SampleRow:
    return SampleRow(prompt="31=", response=text, answer="13", reward=0.5, is_truncated=False)


@pytest.mark.shows("4.19")
def test_a_run_folder_holds_configuration_metrics_and_samples(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with open_log(folder) as run:
        assert folder.stat().st_mode & 0o777 == 0o700  # it holds data of the user's
        values = run.log_step(1, {"reward/mean": Mean(3.0, 4)})
        run.log_samples(1, [sample("13"), sample("é\n\ud800"), sample("third")])
        # Already there while the run goes on.
        assert read_lines(folder / "metrics.jsonl")[0]["reward/mean"] == 0.75
        run.log_step(2, {"reward/mean": Mean(1.0), "policy/grad_norm": Max(float("inf"))})
        run.log_samples(2, [replace(sample("1"), reward=math.inf, logprobs=(-math.inf, -1.0))])
    assert values == {"reward/mean": 0.75}
    assert (folder / "config.yaml").read_text() == "seed: 7\n"
    first, second = read_lines(folder / "metrics.jsonl")
    assert (first["step"], second["policy/grad_norm"]) == (1, None)
    (file,) = (folder / "tensorboard").iterdir()
    assert [
        (event.step, value.tag, round(value.tensor.float_val[0], 6))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ] == [(1, "reward/mean", 0.75), (2, "reward/mean", 1.0)]
    samples = read_lines(folder / "samples.jsonl")
    assert [s["response"] for s in samples] == ["13", "é\n?", "1"]
    whole = {"step": 1, "prompt": "31=", "response": "13", "answer": "13", "reward": 0.5}
    whole |= {"is_truncated": False, "split": "train", "tokens": [], "logprobs": []}
    assert samples[0] == whole
    assert (samples[2]["reward"], samples[2]["logprobs"]) == (None, [None, -1.0])
    assert "Infinity" not in (folder / "samples.jsonl").read_text()


def test_a_former_run_is_never_overwritten_without_being_asked(tmp_path: Path) -> None:
    with open_log(tmp_path / "run") as run:
        run.log_step(1, {"reward/mean": Mean(1.0)})
    (tmp_path / "run-2").mkdir()
    with pytest.raises(RunFolderError, match=r"exists; set trainer\.run_dir=.*run-3, or"):
        open_log(tmp_path / "run")
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1
    with open_log(tmp_path / "run", overwrite=True):
        assert read_lines(tmp_path / "run" / "metrics.jsonl") == []


def test_an_empty_folder_is_taken_and_one_that_is_no_run_or_cannot_be_made_is_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").mkdir()
    with open_log(tmp_path / "empty"):
        assert (tmp_path / "empty" / "config.yaml").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write run folder .*set trainer\.run_dir"):
        open_log(tmp_path / "file" / "run")
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunFolderError, match="it is no run folder and will not be replaced"):
        open_log(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to write files beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.shows("R1.8", "R7.8")
def test_a_full_disk_is_named_at_the_step_that_met_it(tmp_path: Path) -> None:
    with (
        open_log(tmp_path / "run") as run,
        small_disk(1000),
        pytest.raises(RunFolderError, match=r"cannot write run folder .*; free space there"),
    ):
        for step in itertools.count():
            run.log_step(step, {"reward/mean": Mean(step)})
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(step))  # all up to the one at fault


@pytest.mark.shows("R7.8")
def test_a_log_on_a_full_disk_says_so_once_and_goes_on_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("hybridrl.trainer.test")
    log.configure(file=tmp_path / "log.txt")
    try:
        with small_disk(200):
            for number in range(20):
                logger.warning("message %02d of the run", number)
    finally:
        log.configure()
    output = capsys.readouterr().err
    assert output.count("message ") == 20
    assert output.count("log.txt is not written any more: ") == 1
    assert len(output.splitlines()) == 21  # and no traceback of the logging module
    assert "message 00" in (tmp_path / "log.txt").read_text()


@pytest.mark.shows("R7.8")
def test_a_trace_on_a_full_disk_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = SpanRecorder()
    assert recorder.write_to(tmp_path, "driver", num_processes=1)
    with caplog.at_level(logging.WARNING, logger="hybridrl"), small_disk(100):
        for _ in range(3):
            recorder.count({"memory/checkpoint_bytes": 1.0})
            recorder.write()
        recorder.end()
    assert [message.partition(":")[0] for message in caplog.messages] == ["the trace ends here"]


@pytest.mark.shows("R7.7")
@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_that_is_deleted_midway_is_named_at_the_next_step(
    tmp_path: Path, replace: bool
) -> None:
    with open_log(tmp_path / "run") as run:
        run.log_step(1, {"reward/mean": Mean(1.0)})
        shutil.rmtree(tmp_path / "run")
        if replace:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "metrics.jsonl").touch()
        with pytest.raises(RunFolderError, match=r"run was deleted, moved or replaced while"):
            run.log_step(2, {"reward/mean": Mean(1.0)})


OWN = """
import json
from pathlib import Path

def keep_odd(step, metrics):
    with (Path(__file__).parent / "kept.jsonl").open("a") as file:
        print(json.dumps([step, dict(metrics)]), file=file)
    return step % 2 == 1 or None

def change(metrics):
    metrics["reward/mean"] = 0.0

def answer(step):
    return step
"""


@pytest.mark.shows("4.20")
def test_steps_that_a_function_takes_do_not_reach_trackers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with open_log(tmp_path / "run", function=f"{tmp_path}/own.py:keep_odd") as run:
        for step in (1, 2, 3):
            run.log_step(step, {"reward/mean": Mean(0.25), "policy/grad_norm": Max(math.nan)})
    assert read_lines(tmp_path / "kept.jsonl") == [[s, {"reward/mean": 0.25}] for s in (1, 2, 3)]
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    events = EventFileLoader(str(file)).Load()
    assert [event.step for event in events if event.summary.value] == [2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("change", r"own.py:change raised TypeError: .*assignment \(own.py:11\)"),
        ("answer", "own.py:answer returned 1; return True"),
    ],
)
def test_a_function_of_metrics_that_errs_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with (
        open_log(tmp_path / "run", function=f"{tmp_path}/own.py:{name}") as run,
        pytest.raises(TrainingError, match=f"tracking.function={tmp_path}/{message}"),
    ):
        run.log_step(1, {"reward/mean": Mean(0.25)})


class LostService:
    """A tracker of a service that fails in the given steps, and at the end."""

    def __init__(self, failing: set[int]) -> None:
        self.failing = failing
        self.steps: list[int] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)
        if step in self.failing:
            raise ConnectionError("no route to the service")

    def rewind(self, step: int) -> None:
        raise TimeoutError("it does not answer")

    def close(self) -> None:
        raise RuntimeError("it was never connected")

    def take_place_of_wandb(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", self)  # which need not be installed
        monkeypatch.setitem(TRACKERS, "wandb", lambda *_: self)


def test_a_tracker_that_fails_is_named_once_and_is_off_after_three_failures(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = LostService({2, 4, 5})
    service.take_place_of_wandb(monkeypatch)
    with caplog.at_level(logging.WARNING), open_log(tmp_path / "run", trackers=("wandb",)) as run:
        for step in range(1, 9):
            run.log_step(step, {"reward/mean": Mean(step)})
    assert len(_rewards(tmp_path)) == 8
    assert service.steps == [1, 2, 3, 4, 5]
    first, off = caplog.messages
    assert first.startswith("tracking.trackers=[wandb] failed: ConnectionError: no route to the")
    assert off.endswith("This was failure 3; after 3 the tracker gets no more")


def test_a_tracker_that_fails_at_the_end_does_not_hide_the_error_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    LostService(set()).take_place_of_wandb(monkeypatch)
    with (
        pytest.raises(TrainingError, match="its own"),
        open_log(tmp_path / "run", trackers=("wandb",)),
    ):
        raise TrainingError("its own")
    assert "failed: RuntimeError: it was never connected" in caplog.text


class SlowService(LostService):
    """A tracker of a service that does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__(set())
        self.is_called = threading.Event()
        self.goes_on = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.is_called.set()
        self.goes_on.wait()
        super().log(step, values)

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_tracker_that_hangs_holds_no_step_up_and_gets_all_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SlowService()
    service.take_place_of_wandb(monkeypatch)
    with open_log(tmp_path / "run", trackers=("wandb",)) as run:
        for step in range(1, 6):
            run.log_step(step, {"reward/mean": Mean(step)})
        assert (len(_rewards(tmp_path)), service.steps) == (5, [])
        service.goes_on.set()
    assert service.steps == [1, 2, 3, 4, 5]


def test_a_tracker_that_hangs_for_good_is_left_behind_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SlowService()
    service.take_place_of_wandb(monkeypatch)
    monkeypatch.setattr(tracker_thread, "MAX_WAITING", 2)
    monkeypatch.setattr(tracker_thread, "END_S", 0.1)
    with open_log(tmp_path / "run", trackers=("wandb",)) as run:
        for step in range(1, 8):
            run.log_step(step, {"reward/mean": Mean(step)})
            service.is_called.wait()
    texts = [text for text in caplog.messages if text.startswith("tracking.trackers=[wandb]")]
    assert "failed: TimeoutError: 2 steps wait for it; the run continues" in texts[0]
    assert "does not end: left after 0.1 s, with " in texts[-1]
    assert len(_rewards(tmp_path)) == 7
    service.goes_on.set()


def scraped(url: str, *, step: int) -> dict[tuple[str, str], float]:
    """Ask as Prometheus does, until the run has handed this step over: values by gauge and name."""
    parser = import_module("prometheus_client.parser")
    while True:
        with urlopen(url) as answer:
            families = list(parser.text_string_to_metric_families(answer.read().decode()))
        values = {
            (sample.name, sample.labels["metric"]): sample.value
            for family in families
            for sample in family.samples
        }
        if values.get(("hybridrl_step", "step")) == step:
            return values
        time.sleep(0.01)


def test_prometheus_is_answered_with_the_newest_values_until_the_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("prometheus_client")
    with (
        caplog.at_level(logging.INFO, logger="hybridrl"),
        open_log(tmp_path / "one", trackers=("prometheus",)) as one,
        open_log(tmp_path / "two", trackers=("prometheus",)) as two,  # of the same process
    ):
        first, second = [text.split()[-1] for text in caplog.messages if "http://" in text]
        one.log_step(1, {"reward/mean": Mean(0.5), "eval/a-b/reward/mean": Mean(0.1)})
        one.log_step(2, {"reward/mean": Mean(0.75), "eval/a_b/reward/mean": Mean(0.2)})
        two.log_step(7, {"policy/grad_norm": Mean(3.0)})
        assert scraped(first, step=2) == {
            ("hybridrl_step", "step"): 2,
            ("hybridrl_reward_mean", "reward/mean"): 0.75,
            ("hybridrl_eval_a_b_reward_mean", "eval/a-b/reward/mean"): 0.1,
            ("hybridrl_eval_a_b_reward_mean", "eval/a_b/reward/mean"): 0.2,
        }
        assert ("hybridrl_policy_grad_norm", "policy/grad_norm") in scraped(second, step=7)
        one.close()
        with pytest.raises(URLError, match="refused"):
            urlopen(first)


def test_a_port_that_is_taken_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("TEST_PORT", address.partition(":")[2])
        remedy = r"\[prometheus\]: .* in use; set tracking\.prometheus_address=127\.0\.0\.1:0"
        with pytest.raises(TrackerError, match=remedy):
            open_log(tmp_path / "run", trackers=("tensorboard", "prometheus"))
    with open_log(tmp_path / "run"):  # the next try is not told that the folder exists
        pass


def test_tensorboard_reports_a_full_disk_itself(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, tracking(), {})
    with small_disk(1000), pytest.raises(OSError, match="File too large"):
        for step in range(1000):
            tracker.log(step, {"reward/mean": 1.0})
    tracker.close()


def test_an_undeclared_metric_is_refused_and_not_written(tmp_path: Path) -> None:
    with open_log(tmp_path / "run") as run:
        with pytest.raises(MetricError, match="'reward/meen' is not declared"):
            run.log_step(1, {"reward/meen": Mean(1.0)})
        assert read_lines(tmp_path / "run" / "metrics.jsonl") == []


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab", "prometheus"])
def test_a_tracker_that_cannot_be_imported_is_named_and_leaves_no_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, TRACKER_MODULES[name], None)
    with pytest.raises(TrackerError, match=rf"tracking\.trackers=\[{name}\]: .*leave {name} out"):
        open_log(tmp_path / "run", trackers=(name,))
    assert not [path for path in (tmp_path / "run").iterdir() if path.name != ".lock"]


@pytest.mark.shows("R2.4")
def test_what_came_after_a_checkpoint_is_taken_back_from_lines_and_curves(tmp_path: Path) -> None:
    with open_log(tmp_path / "run") as run:
        for step in (1, 2, 3, 4):
            run.log_step(step, {"reward/mean": Mean(step)})
            run.log_samples(step, [sample(str(step))])
            if step == 2:
                sizes, elapsed_s = run.sizes(), run.elapsed_s
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed while it wrote
    for again in (30.0, 40.0):
        with open_log(tmp_path / "run", resumes=True) as run:
            run.rewind(2, sizes=sizes, elapsed_s=elapsed_s + 100)
            assert 100 <= run.elapsed_s < 100 + 60
            run.log_step(3, {"reward/mean": Mean(again)})
    assert _rewards(tmp_path) == [1.0, 2.0, 40.0]
    assert [s["step"] for s in read_lines(tmp_path / "run" / "samples.jsonl")] == [1, 2]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    curve = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert curve == [(1, 1.0), (2, 2.0), (3, 40.0)]
    with open_log(tmp_path / "run", resumes=True) as run:
        run.rewind(0, sizes={}, elapsed_s=0.0)  # there is no checkpoint any more
    assert _rewards(tmp_path) == []


@pytest.mark.shows("R2.5")
@pytest.mark.parametrize(
    ("spoil", "num_left"),
    [
        (lambda data: data[:-40], 2),  # cut in a line
        (lambda data: data.replace(b'"step": 2', b'"step":  2'), 2),  # edited: all lies elsewhere
        (lambda data: b"", 0),
    ],
)
def test_lines_that_are_lost_are_named_and_no_line_is_glued_to_another(
    tmp_path: Path, spoil: Callable[[bytes], bytes], num_left: int, caplog: pytest.LogCaptureFixture
) -> None:
    with open_log(tmp_path / "run", trackers=()) as run:
        for step in (1, 2, 3):
            run.log_step(step, {"reward/mean": Mean(step)})
        sizes = run.sizes()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(spoil(file.read_bytes()))
    num_bytes = file.stat().st_size
    with (
        caplog.at_level(logging.WARNING, logger="hybridrl"),
        open_log(tmp_path / "run", resumes=True, trackers=()) as run,
    ):
        run.rewind(3, sizes=sizes, elapsed_s=0.0)
        run.log_step(4, {"reward/mean": Mean(4.0)})
    assert _rewards(tmp_path) == [*[1.0, 2.0][:num_left], 4.0]
    assert f"lines before step 4 are lost: metrics.jsonl has {num_bytes} bytes" in caplog.text


@pytest.mark.shows("R2.10")
def test_a_folder_is_written_by_one_process_at_a_time_and_free_however_that_ends(
    tmp_path: Path,
) -> None:
    run = open_log(tmp_path / "run")
    script = f"from tests.run.test_tracking import hold; hold({str(tmp_path / 'run')!r})"
    command = [sys.executable, "-c", script]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "another process is writing run folder" in refused.stderr
    run.close()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds it\n"
            with pytest.raises(RunFolderError, match="another process is writing"):
                open_log(tmp_path / "run", resumes=True)
        finally:
            holder.kill()
    run = open_log(tmp_path / "run", resumes=True)
    run.close()
    run.close()  # which is harmless


def hold(folder: str) -> None:
    with open_log(Path(folder), resumes=True, trackers=()):
        sys.stdout.write("holds it\n")
        sys.stdout.flush()
        time.sleep(60)


def _rewards(folder: Path) -> list[object]:
    return [line["reward/mean"] for line in read_lines(folder / "run" / "metrics.jsonl")]


_BLOCK = 32768  # of W&B's file: the log format of LevelDB
_HEADER = 7


def track(folder: str, tracker: str, first: int, last: int) -> None:
    path, resumes = Path(folder), Path(folder).is_dir()
    with open_log(path, resumes=resumes, trackers=(tracker,)) as run:
        if resumes:
            run.rewind(first - 1, sizes=run.sizes(), elapsed_s=0.0)
        for step in range(first, last + 1):
            run.log_step(step, {"reward/mean": Mean(step / 10), "policy/grad_norm": Mean(math.nan)})


def run_part(
    folder: Path, tracker: str, first: int, last: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Track some steps with the real package in a process of its own, as the driver does."""
    program = f"from {__name__} import track; track({str(folder)!r}, {tracker!r}, {first}, {last})"
    environment = {"DO_NOT_TRACK": "true", "WANDB_ERROR_REPORTING": "false"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment | variables,
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield what W&B wrote into its file, as ``wandb sync`` reads it."""
    from wandb.proto import wandb_internal_pb2  # imports all of wandb

    data, at, parts = file.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        if (room := _BLOCK - at % _BLOCK) < _HEADER:
            at += room
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the package
def test_wandb_continues_the_same_run_after_a_resume(tmp_path: Path) -> None:
    for first, last in ((1, 2), (3, 4)):
        part = run_part(tmp_path / "run", "wandb", first, last, WANDB_MODE="offline")
        assert part.returncode == 0, part.stdout
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    records = [record for file in files for record in wandb_records(file)]
    runs = {(r.run.run_id, r.run.project, r.run.display_name) for r in records if r.HasField("run")}
    run_id = (tmp_path / "run" / "wandb_id.txt").read_text()
    assert runs == {(run_id, "test", "run")}
    items = [
        {item.key or item.nested_key[0]: item.value_json for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    values = [(int(item["_step"]), float(item["reward/mean"])) for item in items]
    assert sorted(values) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert all("policy/grad_norm" not in item for item in items)


@pytest.mark.nightly
def test_mlflow_continues_the_same_run_after_a_resume(tmp_path: Path) -> None:
    for first, last in ((1, 2), (3, 4)):
        part = run_part(
            *(tmp_path / "run", "mlflow", first, last),
            MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/store.db",
        )
        assert part.returncode == 0, part.stdout
    with sqlite3.connect(tmp_path / "store.db") as store:
        runs = store.execute("SELECT run_uuid, name, status FROM runs").fetchall()
        metrics = store.execute("SELECT key, step, value FROM metrics ORDER BY step").fetchall()
    store.close()
    assert runs == [((tmp_path / "run" / "mlflow_id.txt").read_text(), "run", "FINISHED")]
    assert metrics == [("reward/mean", step, step / 10) for step in (1, 2, 3, 4)]


@pytest.mark.nightly
def test_trackio_continues_the_same_run_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    for folder in ("one/run", "two/run"):  # two runs, though their folders have one name
        for first, last in ((1, 2), (3, 4)):
            (tmp_path / folder).parent.mkdir(exist_ok=True)
            store = {"TRACKIO_DIR": str(tmp_path / "store")}
            part = run_part(tmp_path / folder, "trackio", first, last, **store)
            assert part.returncode == 0, part.stdout
    with sqlite3.connect(tmp_path / "store" / "test.db") as store_file:
        rows = store_file.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    store_file.close()
    names = [
        f"run-{(tmp_path / name / 'run/trackio_id.txt').read_text()}" for name in ("one", "two")
    ]
    values = [(name, step, json.loads(metrics)["reward/mean"]) for name, step, metrics in rows]
    assert values == [(name, step, step / 10) for name in names for step in (1, 2, 3, 4)]


@pytest.mark.nightly
def test_swanlab_continues_the_same_run_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    for first, last in ((1, 2), (3, 4)):
        part = run_part(tmp_path / "run", "swanlab", first, last, SWANLAB_MODE="offline")
        assert part.returncode == 0, part.stdout
    run_id = (tmp_path / "run" / "swanlab_id.txt").read_text()
    files = sorted((tmp_path / "run" / "swanlab").glob(f"run-*/run-{run_id}.swanlab"))
    scalars = [record.scalar for file in files for record in swanlab_records(file)]
    values = [(s.step, s.key, s.value.number) for s in scalars if s.key]
    assert values == [(step, "reward/mean", step / 10) for step in (1, 2, 3, 4)]


def swanlab_records(file: Path) -> Iterator[Any]:
    """Yield what SwanLab wrote into its file, as ``swanlab sync`` reads it."""
    record = import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    reader = import_module("swanlab.sdk.internal.core_python.store").DataStoreReader()
    reader.open(file)
    yield from (record.FromString(data) for data in reader)
    reader.close()


@pytest.mark.parametrize(
    ("tracker", "variables", "remedy"),
    [
        ("wandb", {"WANDB_API_KEY": "short", "WANDB_MODE": "online"}, "`wandb login`, set WANDB_"),
        *(
            pytest.param(*tracker, marks=pytest.mark.nightly)
            for tracker in (
                (
                    *("mlflow", {"MLFLOW_TRACKING_URI": "file:///nowhere"}),
                    "set MLFLOW_TRACKING_URI=sqlite:",
                ),
                (
                    *("trackio", {"TRACKIO_SERVER_URL": "nowhere"}),
                    "unset TRACKIO_SERVER_URL and TRACKIO_SPACE",
                ),
                (
                    *("swanlab", {"SWANLAB_MODE": "online", "SWANLAB_API_KEY": ""}),
                    "type `swanlab login`, set",
                ),
            )
        ),
    ],
)
def test_a_service_that_refuses_is_told_with_its_remedy(
    tracker: str, variables: dict[str, str], remedy: str, tmp_path: Path
) -> None:
    pytest.importorskip(tracker)
    part = run_part(tmp_path / "run", tracker, 1, 1, **variables)
    assert part.returncode == 1
    assert f"TrackerError: tracking.trackers=[{tracker}]: " in part.stdout
    assert remedy in part.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]  # for the next try
