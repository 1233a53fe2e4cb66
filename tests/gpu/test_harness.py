"""The harness of ``benchmarks/gpu.py`` itself, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu_parts import page
from benchmarks.gpu_parts.bench import Needs, Recorder, Result, Skip, read_result, read_results
from benchmarks.gpu_parts.page import GOALS
from benchmarks.gpu_parts.rank import Cycle, largest_difference
from benchmarks.gpu_parts.registry import PARTS
from benchmarks.gpu_parts.shapes import SHAPES, config_of, ensure_model
from hybridrl.models.architecture import read_architecture
from hybridrl.planning.split import count_parameters

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def command(*words: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "benchmarks/gpu.py", *words),
            *("--out", str(out), "--models", str(out.parent / "models")),
        ],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_that_its_row_says(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters


def test_a_made_model_is_what_transformers_and_planning_read(tmp_path: Path) -> None:
    folder = ensure_model("tiny", tmp_path, device=CPU)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == SHAPES["tiny"].num_parameters
    assert count_parameters(read_architecture(folder)) == SHAPES["tiny"].num_parameters
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(
        0.02, rel=0.1
    )
    before = (folder / "config.json").stat().st_mtime_ns
    assert ensure_model("tiny", tmp_path, device=CPU) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before  # made once


def _run_out_of_memory() -> None:
    raise ValueError("out of memory")


def test_an_error_is_a_result_and_so_is_what_was_found_before_it(tmp_path: Path) -> None:
    record = Recorder(Result("wake", is_dry=False), tmp_path)
    with record.recording():
        record.figure("staged_s", 1.5, "s")
        assert read_result(record.path).status == "running"
        _run_out_of_memory()
    result = read_result(record.path)
    assert result.status == "failed"
    assert result.error.startswith("ValueError: out of memory\n")
    assert result.figures == {"staged_s": [1.5, "s"]}


def test_a_machine_that_is_too_small_skips_with_both_numbers(tmp_path: Path) -> None:
    record = Recorder(Result("cycle_7b", is_dry=False), tmp_path)
    with record.recording():
        Needs(host=1e6).check(tmp_path)
    assert record.result.status == "skipped"
    assert record.result.error.startswith("needs 1000000 GiB of host memory, this machine has ")
    with pytest.raises(Skip, match="free disk"):
        Needs(disk=1e6).check(tmp_path)


def test_a_number_that_is_none_is_kept_as_json_and_misses_its_goal(tmp_path: Path) -> None:
    record = Recorder(Result("cycle_7b", is_dry=False), tmp_path)
    with record.recording():
        record.figure("logprob_difference_nats", float("inf"), "nats")
        record.figure("wake_s", 0.5, "s")
    results = read_results(tmp_path)
    states = {goal.figure: goal.state(results) for goal in GOALS if goal.part == "cycle_7b"}
    assert states["logprob_difference_nats"] == "**missed**"
    assert states["wake_s"] == "**reached**"
    assert states["drain_release_s"] == "unproved"
    assert "| **missed** |" in page.goals_table(results)


def test_a_dry_run_proves_nothing() -> None:
    result = Result("cycle_7b", is_dry=True, status="passed", figures={"wake_s": [0.1, "s"]})
    text = page.document(PARTS, {"cycle_7b": result})
    assert "reached**" not in text
    assert text.count("| unproved |") >= len(GOALS)
    assert text.count(": unproved\n") == len(PARTS)


def test_every_goal_belongs_to_a_part() -> None:
    assert {goal.part for goal in GOALS} <= {part.name for part in PARTS}


def test_the_page_is_what_the_kept_results_say() -> None:
    written = (ROOT / "docs" / "gpu-results.md").read_text(encoding="utf-8")
    assert written == page.document(PARTS, read_results(ROOT / "docs" / "gpu-results"))


def test_log_probs_of_other_tokens_are_infinitely_far_apart() -> None:
    def cycle(tokens: list[int], logprobs: list[float]) -> Cycle:
        return Cycle({}, {}, {}, None, token_ids=[tokens], logprobs=[logprobs])

    first = cycle([1, 2], [-1.0, -2.0])
    assert largest_difference([first, first]) == 0.0
    assert largest_difference([first, cycle([1, 2], [-1.0, -2.25]), first]) == 0.25
    assert largest_difference([first, cycle([1, 3], [-1.0, -2.0])]) == float("inf")


@pytest.mark.nightly
def test_parts_run_dry_from_the_command_line(tmp_path: Path) -> None:
    done = command("--dry", "cycle_0_5b", "lora_garbage", out=tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_results(tmp_path / "out")
    assert {name: result.status for name, result in results.items()} == {
        "cycle_0_5b": "passed",
        "lora_garbage": "passed",
    }
    assert results["cycle_0_5b"].figures["tokens_equal"] == [1.0, "yes"]
    assert results["cycle_0_5b"].not_exercised
    assert results["lora_garbage"].figures["refused_with_guard"] == [1.0, "yes"]
    assert "not exercised, cycle_0_5b: free device memory" in done.stdout


@pytest.mark.nightly
def test_without_a_device_a_part_is_skipped_and_says_how_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("sys.path", [*sys.path])  # as a script, it changes its first entry
    monkeypatch.setattr("sys.argv", ["gpu.py", "start_up", "--out", str(tmp_path / "out")])
    assert import_module("benchmarks.gpu").main() == 0
    result = read_result(tmp_path / "out" / "start_up.json")
    assert result.status == "skipped"
    assert "--dry" in result.error


@pytest.mark.nightly
def test_a_part_past_its_limit_is_ended_and_leaves_a_result(tmp_path: Path) -> None:
    done = command("--dry", "learn", "--limit-s", "0.3", out=tmp_path / "out")
    assert done.returncode == 1
    kept = json.loads((tmp_path / "out" / "learn.json").read_text(encoding="utf-8"))
    assert kept["status"] == "failed"
    assert "was ended at its limit of 0 s" in kept["error"]
