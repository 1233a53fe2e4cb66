from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hybridrl.errors import RunFolderError
from hybridrl.report.page import describe, try_report, write_report
from tests.report.folders import data_of_page, panel, sample, write_folder


def test_a_folder_that_is_no_run_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"is no run folder: it has no config\.yaml and no"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_not_recorded_a_step_has_a_page(tmp_path: Path) -> None:
    data = data_of_page(write_folder(tmp_path))
    assert data["panels"] == []
    assert data["status"]["word"] == "unfinished"
    assert data["status"]["num_done"] == 0


def test_a_running_run_has_a_page_of_its_whole_lines(tmp_path: Path) -> None:
    metrics = [{"step": n, "elapsed_s": 1.5 * n, "reward/mean": 0.1 * n} for n in (1, 2)]
    folder = write_folder(tmp_path, metrics=metrics, samples=[sample(1)], torn='{"step": 3, "rew')
    (folder / "trace.json").write_text('[\n{"ph": "X", "na')
    data = data_of_page(folder)
    assert data["status"] == {
        "word": "unfinished",
        "num_done": 2,
        "num_steps": 4,
        "elapsed_s": 3.0,
    }
    assert panel(folder, "Reward")["lines"][0]["x"] == [1, 2]
    assert [group["step"] for group in data["samples"]["steps"]] == [1]
    assert data["timeline"]["rows"] == []


def test_a_metric_that_was_not_finite_is_a_gap_and_not_a_number(tmp_path: Path) -> None:
    metrics = [
        {"step": 1, "reward/mean": 1.0, "policy/grad_norm": None},
        {"step": 2, "reward/mean": None, "policy/grad_norm": None},
        {"step": 3, "reward/mean": float("nan"), "policy/grad_norm": None},
        {"step": 4, "reward/mean": 2.0, "policy/grad_norm": float("inf")},
    ]
    folder = write_folder(tmp_path, metrics=metrics)
    data = data_of_page(folder)
    assert panel(folder, "Reward")["lines"][0]["y"] == [1.0, None, None, 2.0]
    assert [p["title"] for p in data["panels"]] == ["Reward"]
    assert "NaN" not in json.dumps(data)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 1e308, -1e308, 10**400, "many", None, [1.0], {"a": math.inf}, True],
    ids=str,
)
def test_a_page_is_made_whatever_the_rows_hold(tmp_path: Path, value: object) -> None:
    names = (
        "reward/mean",
        "policy/grad_norm",
        "policy/skipped_updates",
        "time/step_s",
        "elapsed_s",
    )
    rows = [{"step": step, **dict.fromkeys(names, value)} for step in range(1, 41)]
    shown = [sample(step, reward=value, logprobs=[value], tokens=["1"]) for step in (1, 2)]
    shown += [sample(3, logprobs=value, tokens=value, split="eval", response=value, answer=value)]
    folder = write_folder(tmp_path, metrics=rows, samples=shown, torn="[" * 100_000)
    data = data_of_page(folder)
    assert data["status"]["num_done"] == 40
    assert "Infinity" not in json.dumps(data)
    assert "NaN" not in json.dumps(data)
    assert [group["step"] for group in data["samples"]["steps"]] == [1, 2]
    assert len(data["samples"]["stories"]) == 1


def test_of_two_lines_of_a_step_the_later_counts(tmp_path: Path) -> None:
    metrics = [{"step": n, "reward/mean": r} for n, r in ((1, 0.1), (2, 0.2), (2, 0.3), (3, 0.4))]
    line = panel(write_folder(tmp_path, metrics=metrics), "Reward")["lines"][0]
    assert (line["x"], line["y"]) == ([1, 2, 3], [0.1, 0.3, 0.4])


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.sources += [str(v) for name, v in attrs if name in ("src", "href")]


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "<!--<script>", "$data & é"]
)
def test_what_a_model_writes_is_data_and_never_markup(tmp_path: Path, text: str) -> None:
    told = sample(1, prompt=text, response=text, answer=text, tokens=[text], logprobs=[-0.5])
    folder = write_folder(tmp_path, metrics=[{"step": 1, "reward/mean": 1.0}], samples=[told])
    shown = data_of_page(folder)["samples"]["steps"][0]["samples"][0]
    assert {shown["prompt"], shown["response"], shown["answer"], shown["tokens"][0]} == {text}
    tags = _Tags()
    tags.feed((folder / "report.html").read_text(encoding="utf-8"))
    assert tags.scripts == 3  # the data, the library, the page's own
    assert tags.sources == []  # nothing is loaded from anywhere


def test_a_failed_run_says_so_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    log = (
        "10:00:00 I hybridrl.trainer: hello\nthe run ended with an error\nTraceback (most recent\n"
        "hybridrl.errors.RewardError: reward.py raised\n10:00:01 I hybridrl.run.record: "
        "run folder: runs/mine\n"
    )
    data = data_of_page(write_folder(tmp_path, log=log))
    assert data["status"]["word"] == "failed"
    assert data["findings"][0]["text"] == "hybridrl.errors.RewardError: reward.py raised"


def test_a_run_that_went_on_after_an_error_has_not_failed(tmp_path: Path) -> None:
    log = "the run ended with an error\nE: x\n10:00:01 I hybridrl.run.resume: from step 3\n"
    assert describe(write_folder(tmp_path, log=log))["status"]["word"] == "unfinished"


def test_ten_thousand_steps_are_thinned_without_losing_a_spike(tmp_path: Path) -> None:
    metrics = [
        {
            "step": n,
            "elapsed_s": n,
            "reward/mean": 5.0 if n == 4321 else n / 1e4,
            "time/generate_s": 1.0,
            "time/update_s": 2.0 + n % 2,
            "length/response_tokens/mean": 8.0 + n % 3,
            "length/response_tokens/min": 1.0,
            "length/response_tokens/max": 24.0,
        }
        for n in range(1, 10_001)
    ]
    folder = write_folder(tmp_path, metrics=metrics, samples=[sample(n) for n in range(1, 10_001)])
    data = data_of_page(folder)
    for drawn in data["panels"]:
        for line in drawn["lines"]:
            assert len(line["x"]) == len(line["y"]) <= 1000
    reward = panel(folder, "Reward")["lines"][0]
    assert reward["y"][reward["x"].index(4321)] == 5.0
    assert len(data["samples"]["steps"]) == 12
    assert data["samples"]["steps"][-1]["step"] == 10_000
    own = len((folder / "report.html").read_bytes()) - len(_library())
    assert own < 500_000


def _library() -> bytes:
    import plotly

    return (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_bytes()


def test_answers_to_the_same_held_out_prompt_are_told_together(tmp_path: Path) -> None:
    samples = [
        sample(step, split="eval", prompt=prompt, response=f"{prompt}{step}")
        for step in (0, 2, 4)
        for prompt in ("a=", "b=")
    ]
    stories = data_of_page(write_folder(tmp_path, samples=samples))["samples"]["stories"]
    assert [story["prompt"] for story in stories] == ["a=", "b="]
    assert [s["response"] for s in stories[1]["samples"]] == ["b=0", "b=2", "b=4"]


def test_metrics_that_no_plot_names_are_shown_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, metrics=[{"step": 1, "data/epoch": 0.5}])
    drawn = panel(folder, "data/epoch")
    assert drawn["section"] == "Everything else"
    assert drawn["lines"][0]["meaning"] == "passes over the prompts, with fraction"


def test_stages_too_short_to_see_are_one_area(tmp_path: Path) -> None:
    times = {"sample": 1.0, "sync": 0.5, "pause": 1e-5, "drain": 2e-5}
    metrics = [{"step": 1, **{f"time/{stage}_s": s for stage, s in times.items()}}]
    title = "Inside generate: stages of the life cycle"
    lines = panel(write_folder(tmp_path, metrics=metrics), title)["lines"]
    assert [line["label"] for line in lines] == ["sync", "sample", "the rest"]
    assert lines[-1]["y"] == [pytest.approx(3e-5)]
    assert lines[-1]["meaning"] == "together: pause, drain"


def test_bytes_are_shown_in_binary_units(tmp_path: Path) -> None:
    metrics = [{"step": n, "memory/synced_bytes": n * 2**30} for n in (1, 2, 3)]
    drawn = panel(write_folder(tmp_path, metrics=metrics), "Memory moved in a step")
    assert (drawn["unit"], drawn["lines"][0]["y"]) == ("GiB", [1.0, 2.0, 3.0])


def test_the_page_shows_the_last_whole_step_of_the_trace(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, metrics=[{"step": 1, "reward/mean": 1.0}])
    name = {"ph": "M", "name": "process_name"}
    events = [
        name | {"pid": 1, "args": {"name": "driver on a"}},
        name | {"pid": 2, "args": {"name": "rank 0 on b"}},
        _span(1, "step", 1000, 900, item=1),
        _span(1, "generate", 1000, 500),
        _span(2, "generate", 1100, 300, host_bytes=2**21),
        _span(2, "sync", 1100, 100, synced_bytes=64),
        _span(1, "step", 2000, 900, item=2),  # the ranks' part has not come yet
        _span(1, "generate", 2000, 500),
    ]
    (folder / "trace.json").write_text("[\n" + "".join(json.dumps(e) + ",\n" for e in events))
    timeline = data_of_page(folder)["timeline"]
    assert timeline["step"] == 1
    assert [row["name"] for row in timeline["rows"]] == ["driver on a", "rank 0 on b"]
    generate, sync = timeline["rows"][1]["spans"]
    assert (generate["begin_ms"], generate["ms"], generate["depth"]) == (0.1, 0.3, 0)
    assert (sync["depth"], sync["args"]) == (1, {"synced_bytes": 64})
    assert timeline["memory"] == [{"rank": "rank 0 on b", "calls": {"generate": 2.0}}]


def _span(pid: int, name: str, begin: int, dur: int, **args: int) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": begin, "dur": dur, "args": args}


def test_a_report_that_cannot_be_made_is_a_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path / "run", metrics=[{"step": 1, "reward/mean": 1.0}])
    (folder / "report.html").mkdir()
    try_report(folder)
    assert "no report was made" in caplog.text
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_the_command_prints_the_path_and_starts_without_torch_ray_or_transformers(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "run", metrics=[{"step": 1, "reward/mean": 1.0}])
    code = (
        "import runpy, sys\n"
        "sys.argv = ['report', sys.argv[1], '--output', sys.argv[2]]\n"
        "runpy.run_module('hybridrl.report', run_name='__main__')\n"
        "heavy = {'torch', 'ray', 'transformers', 'tensordict', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 1_000_000


def test_the_command_refuses_a_folder_that_is_no_run_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.report", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("RunFolderError: ")
    assert done.stderr.count("\n") == 1
