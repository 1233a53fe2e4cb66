from __future__ import annotations

import io
import json
import math
import shlex
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.metrics import DECLARATIONS, format_duration, format_value
from hybridrl.run import display as live
from hybridrl.run.display import LiveLines, LiveTable, LiveView, open_live, sparkline, squeeze
from hybridrl.run.record import describe_end, resume_command
from tests.config.values import config_of
from tests.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    stream = io.StringIO()
    with open_live("auto", num_steps=20, stream=stream) as view:
        view.phase("generate")
        view.step(1, {"reward/mean": 0.25, "eval/reward/mean": 0.5, "time/step_s": 1.5})
        view.step(2, {"reward/mean": 0.5})
        for step in range(3, 13):
            view.step(step, {"reward/mean": float(step), "policy/grad_norm": 2.0})
    first, second, *_, last = stream.getvalue().splitlines()
    # What comes before the end of the first step is start-up, and tells nothing of the pace.
    assert first == "step 1/20  reward/mean 0.25  eval/reward/mean 0.5  time/step_s 1.5"
    assert second.startswith("step 2/20  reward/mean 0.5 (mean of 2: 0.375)")
    assert last.startswith("step 12/20  reward/mean 12 (mean of 10: 7.5)  policy/grad_norm 2")
    assert "\x1b" not in stream.getvalue()


def test_no_line_is_written_if_live_is_off() -> None:
    terminal = Terminal()
    with open_live("off", num_steps=1, stream=terminal) as view:
        view.phase("generate")
        view.step(1, {"reward/mean": 1.0})
    assert terminal.getvalue() == ""


def test_the_step_shown_is_the_step_that_runs() -> None:
    view = LiveView(9)
    view.phase("load data")
    view.progress("2,048 rows")
    assert view.describe_phase() == "load data: 2,048 rows, 0 s"
    view.phase("start workers")
    assert view.describe_phase() == "start workers, 0 s"
    view.step(0, {"eval/reward/mean": 0.5})
    view.begin_step(1)
    view.phase("generate")
    assert view.describe_phase() == "step 1/9: generate, 0 s"
    view.step(1, {})
    assert view.describe_phase() == "after step 1, 0 s"
    view.begin_step(2)
    view.break_off()
    view.phase("start workers")
    assert view.describe_phase() == "start workers, 0 s"


def test_metrics_of_a_step_that_ended_do_not_end_the_running_one() -> None:
    stream = io.StringIO()
    live = LiveLines(9, stream=stream)
    live.begin_step(1)
    live.step(1, {"reward/mean": 0.5})
    live.begin_step(2)
    live.phase("evaluate")
    live.step(1, {"eval/reward/mean": 0.25})
    assert live.describe_phase().startswith("step 2/9: evaluate")
    assert (live.num_done, live.trends["eval/reward/mean"]) == (1, [0.25])
    live.step(2, {"reward/mean": 0.5})
    words = [line.split("  ")[:2] for line in stream.getvalue().splitlines()]
    assert [line[0] for line in words] == ["step 1/9", "step 1/9", "step 2/9"]
    assert words[1] == ["step 1/9", "eval/reward/mean 0.25"]


def test_time_left_counts_no_second_of_a_restart() -> None:
    view = LiveView(10**9)
    for step in (1, 2):
        view.step(step, {"reward/mean": 0.5})
    assert view.describe_time_left() != ""
    view.num_steps = 2  # less than a second is no time left
    assert view.describe_time_left() == ""
    view.num_steps = 10**9
    view.break_off()
    assert view.describe_time_left() == ""
    view.rewind(1, [{"reward/mean": 0.25}])
    assert (view.num_done, view.trends) == (1, {"reward/mean": [0.25]})
    view.step(2, {"reward/mean": 0.5})
    assert view.describe_time_left() == ""  # from the end of the last part to this one is no pace


def test_a_long_silence_says_which_phase_takes_so_long_and_stops_with_the_run() -> None:
    stream = io.StringIO()
    lines = LiveLines(9, stream=stream, heartbeat_s=0.05)
    lines.start()
    lines.begin_step(1)
    lines.phase("logprobs")
    wait_until(lambda: stream.getvalue().count("step 1/9: logprobs, ") >= 2)
    lines.stop()
    length = len(stream.getvalue())
    assert all(thread.name != "live-lines" for thread in threading.enumerate())
    assert len(stream.getvalue()) == length


def test_a_terminal_gets_a_table_with_progress_phase_and_trends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one gets no escapes
    Console(file=io.StringIO(), width=80).print(LiveTable(3))  # before the first step
    stream = Terminal()
    with open_live("auto", num_steps=3, stream=stream) as view:
        view.step(1, {"reward/mean": 0.25, "time/step_s": 2.0})
        view.step(2, {"reward/mean": 0.75, "throughput/tokens_per_s": 12345.0})
        view.begin_step(3)
        view.phase("update")
    assert "\x1b" in stream.getvalue()
    for text in ("step 3/3: update", "reward/mean", "0.75", "mean of 10", "0.5 ", "▁█", "12,345"):
        assert text in stream.getvalue()


def test_a_view_ends_with_an_error_of_the_run() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), open_live("lines", num_steps=1, stream=stream):
        raise KeyError
    assert all(thread.name != "live-lines" for thread in threading.enumerate())


def test_all_shown_metrics_are_declared() -> None:
    assert set(live._SHOWN) <= set(DECLARATIONS)


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (sparkline, [0.0, 1.0], "▁█"),
        (sparkline, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        (sparkline, [3.0, 3.0], "▅▅"),
        (sparkline, [0.0, 0.0], "▁▁"),
        (sparkline, [1.0, math.nan, 2.0, math.inf], "▁ █ "),
        (sparkline, [math.nan], " "),
        (sparkline, [], ""),
        (format_value, 0.0, "0"),
        (format_value, 0.123456, "0.1235"),
        (format_value, 1e-5, "1e-05"),
        (format_value, 12345.6, "12,346"),
        (format_value, math.nan, "nan"),
        (format_value, None, "-"),
        (format_duration, 3.2, "3 s"),
        (format_duration, 89, "89 s"),
        (format_duration, 600, "10 min"),
        (format_duration, 7500, "2 h 05 min"),
    ],
)
def test_trends_numbers_and_durations_are_short(
    write: Callable[[Any], str], value: object, text: str
) -> None:
    assert write(value) == text


def test_a_long_trend_is_squeezed_into_means_of_equal_stretches() -> None:
    assert squeeze([1.0, 2.0], width=4) == [1.0, 2.0]
    assert squeeze([1.0, 3.0, 5.0, 7.0], width=2) == [2.0, 6.0]
    assert squeeze([1.0, 2.0, 4.0, 6.0, 8.0], width=2) == [1.5, 6.0]


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_run_goes_on_when_nobody_reads_its_lines_any_more() -> None:
    with open_live("lines", num_steps=3, stream=ClosedPipe()) as view:
        view.step(1, {"reward/mean": 0.5})
        view.step(2, {"reward/mean": 0.5})


COMMAND = ("python", "-m", "hybridrl.main", "seed=3", "trainer.overwrite=true")


def config_in(folder: Path, *overrides: str) -> ExperimentConfig:
    return config_of(f"trainer.run_dir={folder}", "trainer.num_steps=3", *overrides)


def write_run(folder: Path, rewards: Sequence[float], *places: str) -> None:
    lines = [
        {"step": step, "elapsed_s": 2.0 * step, "eval/reward/mean": reward, "reward/mean": step}
        for step, reward in enumerate(rewards)
    ]
    folder.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 4, "rew')
    for place in places:
        (folder / place).mkdir(parents=True)


def rows_of(text: str) -> dict[str, str]:
    return dict(
        line.split(maxsplit=1) for line in text.replace("to continue", "continue").splitlines()
    )


def test_a_finished_run_says_what_it_learned_and_where_all_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_in(folder)
    write_run(folder, [0.5, 0.8, 0.6, 0.7], "hf", "checkpoints/step-000000003")
    (folder / "report.html").touch()
    rows = rows_of(describe_end(config, command=COMMAND, error=None))
    assert rows["finished"] == "after step 3 of 3, 6 s"
    assert rows["eval/reward/mean"] == "0.5 -> 0.7, best 0.8 after step 1"
    assert rows["reward/mean"] == "0.5 -> 2.5 (means of 2 steps)"
    assert rows["model"] == str(folder / "hf")
    assert rows["report"] == str(folder / "report.html")
    assert rows["checkpoint"] == str(folder / "checkpoints" / "step-000000003")
    assert shlex.split(rows["continue"]) == [
        *COMMAND[:4],
        f"trainer.run_dir={folder}",
        "trainer.num_steps=6",
    ]


def test_a_run_that_epochs_ended_is_continued_with_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_in(folder, "trainer.num_epochs=1.5", "trainer.num_steps=50")
    write_run(folder, [0.5, 0.8, 0.6], "checkpoints/step-000000002")
    rows = rows_of(describe_end(config, command=COMMAND, error=None))
    assert rows["finished"] == "after step 2 of 2, 4 s"
    assert shlex.split(rows["continue"])[-2:] == ["trainer.num_steps=100", "trainer.num_epochs=3"]


def test_a_stopped_run_says_the_command_that_resumes_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_in(folder)
    write_run(folder, [0.5, 0.8], "checkpoints/step-000000001")
    rows = rows_of(describe_end(config, command=COMMAND, error=KeyboardInterrupt()))
    assert rows["reward/mean"] == "0 -> 1 (first and last step)"
    assert rows["stopped"] == "after step 1 of 3, 2 s"
    assert shlex.split(rows["continue"]) == [*COMMAND[:4], f"trainer.run_dir={folder}"]
    assert "model" not in rows


def test_a_run_stopped_in_its_start_says_so_and_promises_no_way_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    text = describe_end(config_in(tmp_path / "run"), command=COMMAND, error=KeyboardInterrupt())
    assert text.split() == ["stopped", "before", "step", "1", "of", "3"]


def test_a_command_is_quoted_where_a_shell_would_change_it() -> None:
    command = resume_command(("python", "a=1", "b=[x, y]"), run_dir="my runs", changes=("a=2",))
    assert command == "python 'b=[x, y]' 'trainer.run_dir=my runs' a=2"
