"""Every script of benchmarks/ runs once, at toy size: that it measures well is not shown here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import families
from benchmarks.algorithms import SETS, print_table
from benchmarks.sides.ahead_in_turns import Recorded, train_in_turns
from benchmarks.sides.curves import Run, draw
from hybridrl.run.starter import write_random_model
from tests.end_to_end.small import SMALL, VARIED, small_config
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LIBRARIES = {"budget", "child", "source_tree"}

TABLES: Mapping[str, list[str]] = {
    "agents": [
        *("--conversations", "4", "--slots", "4", "--waits", "0.01"),
        *("--scales", "1", "--rounds", "1"),
    ],
    "gpu": ["--list"],
}
OF_RANKS: Mapping[str, list[str]] = {
    "rollout": ["--rounds", "1", "--slots", "8"],
    "memory_plan": ["default"],
    "lora": ["--rounds", "1", "--rank", "2"],
    "serving": [
        *("--rounds", "1", "--draws", "1", "--engines", "4", "--requests", "16"),
        *("model.starter.num_layers=1", "model.starter.hidden_size=60"),
    ],
    "megatron": ["--rounds", "1", "--cases", "1"],
    "prefix_tree": ["--rounds", "1", "--turns", "2"],
    "dispatch": [
        *("--empty-rounds", "2", "--batch-rounds", "1"),
        *("--sizes", "1", "--batch-mb", "4"),
    ],
}
RUNS: Mapping[str, list[str]] = {
    "checkpoint": ["--steps", "9"],
}
STARTS_OFTEN: Mapping[str, list[str]] = {
    "startup": ["--runs", "1", "--kinds", "without evaluation"],
    "kills": ["--kills", "1"],
}
OTHERS = {  # tests of their own
    *("against_trl", "algorithms", "figures", "picture", "publish", "weight_sync"),
    *("asynchronous", "families", "router", "weight_deltas"),
}


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_every_script_has_its_test() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - LIBRARIES
    assert scripts == {*TABLES, *OF_RANKS, *RUNS, *STARTS_OFTEN, *OTHERS}


def call(name: str, *arguments: str, patch: pytest.MonkeyPatch) -> object:
    """Do what ``run`` does within this process."""
    patch.chdir(ROOT)
    patch.setattr("sys.argv", [name, *arguments])
    return import_module(f"benchmarks.{name}").main()


@pytest.mark.parametrize("name", TABLES)
def test_a_benchmark_without_a_run_prints_something(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not call(name, *TABLES[name], patch=monkeypatch)
    assert capsys.readouterr().out.strip()


RECORDED = """
import pytest

@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("number", [2e-6, 1e-6])
def test_it(record_property, family, number):
    record_property("packed", number)
    assert family == "qwen3"
"""


def test_the_table_of_families_has_what_tests_recorded_that_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_recorded.py").write_text(RECORDED)
    call("families", str(tmp_path / "test_recorded.py"), patch=monkeypatch)
    rows = {line.split("|")[1].strip(): line for line in capfd.readouterr().out.splitlines()}
    assert rows["`qwen3`"] == "| `qwen3` | 2e-06 |  |  |  |  | equal |"
    assert rows["`llama`"] == "| `llama` |  |  |  |  |  | equal |"


def test_each_column_of_the_table_of_families_is_recorded_by_its_tests() -> None:
    texts = []
    for file, _, name in (test.partition("::") for test in families.TESTS):
        texts.append((ROOT / file).read_text(encoding="utf-8"))
        assert f"\ndef {name}(" in texts[-1], (file, name)
    recorded = set(re.findall(r'record_property\("(\w+)"', "".join(texts)))
    assert families.COLUMNS.keys() <= recorded


@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_RANKS)
def test_a_benchmark_that_starts_ranks_prints_something(name: str) -> None:
    assert run(name, *OF_RANKS[name]).strip()


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_of_a_run_prints_its_table(name: str) -> None:
    small = [word for word in SMALL if not word.startswith("trainer.num_steps")]
    assert "| step" in run(name, *RUNS[name], *small)


@pytest.mark.nightly
@pytest.mark.parametrize("name", STARTS_OFTEN)
def test_a_benchmark_that_starts_runs_again_and_again(name: str, tmp_path: Path) -> None:
    models = ["--models", str(tmp_path)] if name == "startup" else []
    assert run(name, *STARTS_OFTEN[name], *models, *SMALL).strip()


@pytest.mark.nightly
def test_runs_that_sample_ahead_stand_beside_one_that_does_not() -> None:
    small = [f"model.starter.{word}" for word in ("num_layers=1", "num_warmup_steps=4")]
    sizes = ("--staleness", "0", "1", "--steps", "5")
    lines = run("asynchronous", *sizes, *small).splitlines()
    (row,) = [line for line in lines if line.startswith("| 1 | ")]
    said = [float(cell.replace(",", "")) for cell in row.strip("|").split("|")]
    assert len(said) == 8
    assert 0 < said[6] <= 1  # staleness


def test_curves_of_stale_rows_are_drawn_from_kept_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finals = iter((0.5, 0.75, 0.125))

    def trained(words: Sequence[str]) -> Recorded:
        rows: list[dict[str, float]] = [
            {"step": step, "eval/reward/mean": mean}
            for step, mean in ((0, 0.25), (1, 0.375), (2, next(finals)))
        ]
        is_stale = "trainer.max_staleness=4" in words
        for row, share in zip(rows[1:] if is_stale else [], (0.25, 0.5), strict=False):
            row["policy/effective_sample_fraction"] = share
        return Recorded(rows)

    monkeypatch.setattr("benchmarks.algorithms.train_in_turns", trained)
    monkeypatch.setattr("benchmarks.algorithms.starter_model", lambda *_: tmp_path)
    picture = tmp_path / "curves.svg"
    where = ("--curves", "staleness", "--cache", str(tmp_path / "cache"), "--picture", str(picture))
    asked = (("0", "K = 0"), ("0 1", "K = 0"), ("0", "K = 4, clipped"))
    for seeds, setting in asked:  # the second one trains seed 1 alone
        words = ("--seeds", *seeds.split(), "--settings", setting, *where)
        call("algorithms", *words, patch=monkeypatch)
    said = capsys.readouterr().out
    assert "| K = 0 | 2 | 0.250 | 0.375 | 0.500 | 0.500 to 0.500 | 0.500 | 0.0 |  |" in said
    assert "| K = 0 | 2 | 0.250 | 0.375 | 0.625 | 0.500 to 0.750 | 0.750 | 0.0 |  |" in said
    assert "| K = 4, clipped | 2 | 0.250 | 0.375 | 0.125 | 0.125 to 0.125 | 0.375 |" in said
    assert said.rstrip().endswith("| 0.50 |")
    assert ">K = 4, clipped</text>" in picture.read_text()


@pytest.mark.nightly
def test_rows_sampled_in_turns_are_k_steps_old(tmp_path: Path) -> None:
    (steps,) = run_ranks(1, _steps_of_batches, tmp_path)
    assert steps == [0, 1, 2, 2, 2]


def _steps_of_batches(rank: int, folder: Path) -> list[int]:
    shape = small_config(folder).model.starter
    assert shape is not None
    write_random_model(shape, folder / "model", seed=0)
    words = [one for one in SMALL if not one.startswith("trainer.num_steps")]
    words += ["trainer.num_steps=5", "eval.every_num_steps=0", VARIED]
    words += ["algorithm.rollout_correction=importance", "trainer.max_staleness=2"]
    words += [f"model.path={folder / 'model'}", "model.starter=null"]
    rows = train_in_turns(words).rows
    return [round(row["rollout/staleness_steps/max"]) for row in rows]


@pytest.mark.nightly
def test_learning_curves_of_finished_runs_are_kept(tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    where = ("--cache", str(tmp_path / "cache"), "--picture", str(picture), *SMALL)
    first = run("algorithms", "--settings", "GRPO", "--seeds", "0", *where)
    (kept,) = (tmp_path / "cache").glob("GRPO-*.json")
    record = json.loads(kept.read_text())
    kept.write_text(json.dumps(record | {"accuracies": [0.25, 0.0, 0.5]}))
    both = ("--settings", "GRPO", "algorithms/dr_grpo", "--seeds", "0", *where)
    assert "| GRPO | 3 | 0.250 | 0.000 | 0.500 |" in run("algorithms", *both)
    assert "| GRPO | 3 | 0." in first
    assert ">algorithms/dr_grpo</text>" in picture.read_text()


@pytest.mark.parametrize(
    "name",
    [
        *("against_trl", "algorithms", "publish", "router"),
        *(name for name in (*OF_RANKS, *RUNS, *STARTS_OFTEN) if name != "memory_plan"),
    ],
)
def test_a_benchmark_that_starts_runs_can_be_asked(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        call(name, "--help", patch=monkeypatch)
    assert ended.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.sglang
def test_the_benchmark_of_weight_sync_prints_its_table() -> None:
    assert "| shared |" in run("weight_sync", "--rounds", "1")


@pytest.mark.nightly
@pytest.mark.sglang
def test_the_benchmark_of_changes_of_weights_prints_its_table() -> None:
    assert "| 1e-05 | changes |" in run("weight_deltas", "--num-steps", "1")


@pytest.mark.nightly
def test_our_side_of_the_race_runs_without_trl(tmp_path: Path) -> None:
    shape = small_config(tmp_path).model.starter
    assert shape is not None
    write_random_model(shape, tmp_path / "model", seed=0)
    small = ["tracking.num_samples_per_step=0", "cluster.num_threads_per_rank=1"]
    said = run(
        *("against_trl", "--alone", "--cases", "default", "--rounds", "1", "--warmup-steps", "1"),
        *("--model", str(tmp_path / "model"), *(word for one in small for word in ("--ours", one))),
    )
    assert said.startswith("default: ")


@pytest.mark.nightly
def test_a_side_that_ends_early_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.against_trl", "--alone", "--model", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert "hybridrl ended early" in done.stderr
    assert "config.json" in done.stderr


def test_curves_have_a_panel_each_with_mean_and_band(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        "GRPO": [Run([0, 10], [0.41, 0.7], 1.0), Run([0, 10], [0.43, 0.8], 0.5)],
        "mine": [Run([0, 5], [0.42, 0.6], 1.5)] * 2,
    }
    print_table(runs)
    table = capsys.readouterr().out
    assert "| GRPO | 10 | 0.420 | 0.750 | 0.750 | 0.700 to 0.800 | 0.800 | 0.5 |" in table
    assert "| mine | 5 | 0.420 | 0.600 | 0.600 | 0.600 to 0.600 | 0.600 | 1.5 |" in table
    first, second = draw(runs).split("<g ")[1:]
    assert ">GRPO<" in first
    assert 'points="34.0,141.0 188.0,30.0 188.0,60.0 34.0,147.0"' in first  # .43 .8 and .7 .41
    assert first.count('points="34.0,144.0 188.0,45.0"') == 2  # its mean, also as the thin line
    assert second.count('points="34.0,144.0 188.0,45.0"') == 1
    assert 'points="34.0,144.0 111.0,90.0"' in second


def test_the_curve_of_conversations_is_drawn_from_kept_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finals = iter((0.75, 0.25))
    measured = replace(
        SETS["calculator"], measure=lambda _: Run([0, 10], [0.25, next(finals)], 0.5)
    )
    monkeypatch.setitem(SETS, "calculator", measured)
    picture = tmp_path / "curve.svg"
    words = ["--curves", "calculator", "--seeds", "0"]
    words += ["--cache", str(tmp_path), "--picture", str(picture)]
    for _ in range(2):  # the second time nothing is measured
        call("algorithms", *words, patch=monkeypatch)
        assert "| with the tool | 10 | 0.250 | 0.750 | 0.750 |" in capsys.readouterr().out
    assert ">without</text>" in picture.read_text()


def test_the_picture_of_a_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"step": 1, "reward/mean": 0.5, "time/step_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    call("picture", str(tmp_path), str(tmp_path / "run.svg"), patch=monkeypatch)
    assert "<svg" in (tmp_path / "run.svg").read_text()
