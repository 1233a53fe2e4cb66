"""What a whole run leaves to look at: its trace, its samples, its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridrl.errors import RewardError
from hybridrl.run.launch import run
from tests.end_to_end.small import small_config
from tests.report.folders import page_of
from tests.trace_events import Event, check, names_of, spans_of

pytestmark = pytest.mark.usefixtures("ray_cluster")

_EDGES = {
    "offload_optimizer",
    "resume_weights",
    "sync",
    "offload_parameters",
    "resume_cache",
    "continue",
} | {*("skew", "pause", "drain", "release", "onload_training")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks whose engines sleep, with old log-probs asked for."""
    path = tmp_path_factory.mktemp("records") / "run"
    overrides = ("cluster.num_ranks_per_node=2", "rollout.sleep=true")
    config = small_config(path, *overrides, "algorithm.old_logprobs=recompute")
    run(config, resolved_yaml="mode: train\ntrainer: {num_steps: 3}\n")
    return path


@pytest.fixture(scope="module")
def events(folder: Path) -> list[Event]:
    """Of the trace, without the ranks that made the starter model."""
    events: list[Event] = json.loads((folder / "trace.json").read_text())
    check(events)
    begin = max(e["ts"] for e in spans_of(events, "start workers"))
    rows = [row for row, name in names_of(events).items() if "SupervisedWorker" not in name]
    return [e for e in events if e["pid"] in rows and e.get("ts", begin) >= begin]


def test_the_trace_has_a_row_for_the_driver_and_each_rank(events: list[Event]) -> None:
    names = names_of(events)
    assert names[1].startswith("driver on ")
    assert sorted(name.partition(" on ")[0] for name in names.values())[1:] == [
        "rank 0 ActorRolloutWorker",
        "rank 1 ActorRolloutWorker",
    ]


def test_the_trace_has_every_phase_and_every_edge_of_the_life_cycle_on_every_rank(
    events: list[Event],
) -> None:
    driver = {e["name"] for e in spans_of(events) if e["pid"] == 1}
    assert {"start workers", "step", "eval", "generate", "reward", "logprobs", "update"} <= driver
    for row in set(names_of(events)) - {1}:
        names = {e["name"] for e in spans_of(events) if e["pid"] == row}
        assert names >= _EDGES | {"build", "generate", "sample", "compute_logprobs", "update"}
        assert names >= {"microbatch", "export_hf"}
    steps = [e["args"]["item"] for e in spans_of(events, "step")]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "phases"),
    [
        ("generate", {"generate", "eval"}),
        ("compute_logprobs", {"logprobs"}),
        ("update", {"update"}),
    ],
)
def test_what_a_rank_does_in_a_call_lies_within_the_drivers_call(
    events: list[Event], call: str, phases: set[str]
) -> None:
    driver = [e for e in spans_of(events) if e["pid"] == 1 and e["name"] in phases]
    ranks = [e for e in spans_of(events, call) if e["pid"] != 1]
    assert len(ranks) == 2 * len(driver) > 0
    for span in ranks:
        assert sum(_holds(outer, span) for outer in driver) == 1


def test_bytes_moved_stand_beside_the_stage_that_moved_them(events: list[Event]) -> None:
    for stage, bytes_name in (("sync", "synced_bytes"), ("release", "released_bytes")):
        moved = [e["args"].get(bytes_name, 0) for e in spans_of(events, stage)]
        assert max(moved) > 1000
    assert all(e["args"]["host_bytes"] > 2**20 for e in spans_of(events, "update") if e["pid"] > 1)


def test_counters_follow_the_metrics(folder: Path, events: list[Event]) -> None:
    counted = {e["name"] for e in events if e["ph"] == "C"}
    assert counted >= {"host memory, MiB", "eval/reward/mean"}
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    values = [e["args"]["value"] for e in events if e["name"] == "eval/reward/mean"]
    assert values[0] == first["eval/reward/mean"]


def test_samples_of_steps_and_evaluations_carry_the_log_probs_of_their_tokens(
    folder: Path,
) -> None:
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples if s["split"] == "train"} == {1, 2, 3}
    assert {s["step"] for s in samples if s["split"] == "eval"} == {0, 2, 3}
    for sample in samples:
        assert 0 < len(sample["tokens"]) == len(sample["logprobs"])
        assert all(logprob <= 0 for logprob in sample["logprobs"])
        assert "".join(sample["tokens"]).startswith(sample["response"])
    by_step = [_prompts(samples, step) for step in (0, 2, 3)]
    assert by_step[0] == by_step[1] == by_step[2]


def test_the_page_of_the_run_shows_all_of_it(folder: Path) -> None:
    assert (folder / "report.html").is_file()
    page = page_of(folder)
    assert "finished\n: step 3 of 3" in page.text
    parts = ("Learning", "Policy", "Responses", "Time", "What the model writes", "Configuration")
    assert set(parts) <= set(page.texts)
    assert "machine of the driver" in page.texts
    assert len(page.scripts) > 10  # the library, and a chart each
    assert page.text.count("answer: ") == 4


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> tuple[Path, str]:
    """The folder of a run without trace whose reward function raises, and the error."""
    tmp_path = tmp_path_factory.mktemp("failed")
    reward = tmp_path / "reward.py"
    reward.write_text("def broken(responses, **_):\n    return [1 / 0 for _ in responses]\n")
    overrides = (
        "tracking.trace=false",
        "eval.every_num_steps=0",
        f"reward.function={reward}:broken",
    )
    config = small_config(tmp_path / "run", *overrides)
    with pytest.raises(RewardError) as raised:
        run(config, resolved_yaml="mode: train\n")
    return tmp_path / "run", str(raised.value)


def test_a_reward_function_that_raises_ends_the_run_by_name(failed: tuple[Path, str]) -> None:
    folder, error = failed
    assert re.search(r"reward\.py:broken.*ZeroDivisionError", error)
    assert "ZeroDivisionError" in (folder / "log.txt").read_text()


def test_a_run_without_trace_has_none_and_one_that_fails_has_its_page(
    failed: tuple[Path, str],
) -> None:
    folder, _ = failed
    assert not (folder / "trace.json").exists()
    assert (folder / "report.html").is_file()
    text = page_of(folder).text
    assert "failed\n: step 0" in text
    assert "ZeroDivisionError" in text


def _prompts(samples: list[dict[str, Any]], step: int) -> list[str]:
    return [s["prompt"] for s in samples if s["split"] == "eval" and s["step"] == step]


def _holds(outer: Event, inner: Event) -> bool:
    return bool(
        outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    )
