from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from math import log
from pathlib import Path
from statistics import fmean

import psutil
import pytest

from hybridrl.env import ROOT
from tests.end_to_end.runs import train
from tests.end_to_end.small import SMALL, VARIED, read_metrics
from tests.serving.processes import servers_below
from tests.sglang.topologies import WITHOUT_MOONCAKE, WITHOUT_NCCL
from tests.waiting import wait_until

NUM_STEPS = 40  # of the default 100; the mean reward of a step goes 0.33 -> 0.47 here
TIMEOUT_S = 400  # 25 s of CPU for the server, 1 to 2 s a step


# One server for both ranks, as they share a model.
MEGATRON = ("recipes=cpu/megatron", "rollout.tensor_parallel_size=2")


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("overrides", [(), MEGATRON], ids=["fsdp2", "megatron-tp2"])
def test_the_default_task_is_learnt_on_sglang_and_no_process_is_left(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    lines = run_on_sglang(tmp_path, *overrides, num_steps=NUM_STEPS)
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    # Not the evaluation, whose 128 greedy answers go up and down by more than that.
    assert fmean(rewards[-15:]) > fmean(rewards[:10]) + 0.05


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_conversations_are_learnt_on_sglang(tmp_path: Path) -> None:
    lines = run_on_sglang(tmp_path, "recipes=cpu/calculator", num_steps=40)
    steps = [line for line in lines if "agent/turns/mean" in line]
    rewards = [step["reward/mean"] for step in steps]
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.2  # 0.34 -> 0.85
    assert steps[-1]["agent/tool_calls/mean"] > 0.8  # from 0.3: it has learnt to call the tool


@pytest.mark.nightly
@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.shows("4.1")
@pytest.mark.parametrize(
    "task",
    [
        ("serving.router=sglang", "trainer.profile_steps=[2]"),
        ("recipes=cpu/calculator", "serving.router=sglang", "eval.max_response_tokens=150"),
        ("recipes=cpu/calculator", "serving.weights=broadcast", "eval.max_response_tokens=150"),
    ],
    ids=["digits-router", "agent-router", "agent-broadcast"],
)
def test_two_servers_agree_with_the_trainer(tmp_path: Path, task: tuple[str, ...]) -> None:
    small = [override for override in SMALL if override.startswith("model.")]
    lines = run_on_sglang(tmp_path, *small, "serving=own", *task, num_steps=2)
    steps = [line for line in lines if "loss/policy" in line]
    assert [line["rollout/repeated_requests"] for line in steps] == [0, 0]
    if "trainer.profile_steps=[2]" in task:
        assert_profiled(tmp_path / "run", "server-0", "server-1")
    if "recipes=cpu/calculator" in task:
        require_longer_evaluations(lines, 150, usual=96)
    for line in steps if "serving.router=sglang" in task else ():
        assert line["rollout/router_restarts"] == line["rollout/unanswered_routed_requests"] == 0
        assert line["rollout/routed_requests"] > 0
        assert line["time/routed_request_s"] > 0


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(TIMEOUT_S + 20)
def test_a_short_run_on_sglang_agrees_with_its_trainer(tmp_path: Path) -> None:
    before = servers_below()
    lines = train(
        tmp_path / "run",
        *("rollout=sglang", "rollout.start_timeout_s=150", "cluster.start_timeout_s=160"),
        *("data.max_prompt_tokens=24", "rollout.max_response_tokens=24"),
        "rollout.num_responses_per_prompt=8",
        *("rollout.top_k=8", "rollout.top_p=0.9", "rollout.sampling_masks=true"),
        *("eval.every_num_steps=3", "eval.max_response_tokens=100", "trainer.num_steps=3"),
        *("checkpoint.every_num_steps=0", "trainer.profile_steps=[1,2]"),
    )
    steps = [line for line in lines if "loss/policy" in line]
    assert len(steps) == 3
    assert max(step["policy/sampler_mismatch_nats/max"] for step in steps) < 1e-5
    assert max(step["policy/entropy_nats/mean"] for step in steps) <= log(8)
    require_shared_prompts(lines)
    assert_profiled(tmp_path / "run", "engine-0")
    require_longer_evaluations(lines, 100, usual=24)
    wait_until(lambda: servers_below() == before)


def require_longer_evaluations(lines: list[dict[str, float]], limit: int, *, usual: int) -> None:
    """Those of an untrained model have the limit of evaluations, those of steps that of steps."""
    longest = "length/response_tokens/max"
    assert {line[longest] for line in lines if longest in line} == {usual}
    assert {line[f"eval/{longest}"] for line in lines if f"eval/{longest}" in line} == {limit}


def run_on_sglang(folder: Path, *overrides: str, num_steps: int) -> list[dict[str, float]]:
    """Run the command; check what holds of every run on SGLang, and return its metrics."""
    evaluated = (f"eval.every_num_steps={num_steps}", "checkpoint.every_num_steps=0")
    lines = require_agreement(folder, *overrides, *evaluated, num_steps=num_steps)
    require_shared_prompts(lines)
    return lines


def require_shared_prompts(lines: list[dict[str, float]]) -> None:
    """A group's prompt is computed once; in the first steps an evaluation counts, too."""
    assert min(line["rollout/prefix_cache_hit_fraction"] for line in lines[2:]) > 0.8


def require_agreement(
    folder: Path, *overrides: str, num_steps: int, timeout_s: float = TIMEOUT_S
) -> list[dict[str, float]]:
    """Run the command; check that it agrees with its trainer and ends its servers."""
    lines = run_command(folder, *overrides, num_steps=num_steps, timeout_s=timeout_s)
    assert_agrees(lines, num_steps=num_steps)
    return lines


def assert_agrees(lines: list[dict[str, float]], *, num_steps: int) -> None:
    """In each step the server and the trainer computed the same log-probs."""
    mismatch = "policy/sampler_mismatch_nats/max"
    assert len([line for line in lines if line.get(mismatch, 1.0) < 1e-3]) == num_steps


def run_command(
    folder: Path, *overrides: str, num_steps: int, timeout_s: float
) -> list[dict[str, float]]:
    """Run the command; check that it ends well and with its servers; return its metrics."""
    command = [
        *(sys.executable, "-m", "hybridrl.main", "rollout=sglang", "tracking.live=off"),
        *("rollout.start_timeout_s=150", "cluster.start_timeout_s=160", *overrides),
        *(f"trainer.run_dir={folder / 'run'}", f"trainer.num_steps={num_steps}"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # stand-ins lie in the test tree
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_of(folder, "sglang::") == []
    return read_metrics(folder / "run")


def assert_profiled(run_folder: Path, *servers: str) -> None:
    """In its second step the ranks were, and beside them these servers, maybe again."""
    files = sorted((run_folder / "profile").glob("step-2.*"))
    of_servers = [file for file in files if ".ActorRolloutWorker." not in file.name]
    assert len(files) > len(of_servers)
    assert [file.name.split(".")[1][: len("engine-0")] for file in of_servers] == list(servers)
    for file in of_servers:
        assert names_in(file) & {"aten::mm", "aten::addmm", "aten::linear"}


def names_in(profile: Path) -> set[str]:
    events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    return {event.get("name", "") for event in events}


def processes_of(folder: Path, prefix: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["name", "cwd"])
        if (process.info["name"] or "").startswith(prefix) and process.info["cwd"] == str(folder)
    ]


NUM_FAULTY_STEPS, EVERY_NUM_STEPS = 20, 3
NUM_KILLS = NUM_FAULTY_STEPS // EVERY_NUM_STEPS
FAULTY_TIMEOUT_S = 1500
"""After most kills a server starts beside one that samples, on two cores."""


@pytest.mark.nightly
@pytest.mark.timeout(FAULTY_TIMEOUT_S + 20)
@pytest.mark.shows("4.15")
def test_a_run_loses_no_sample_to_killed_servers(tmp_path: Path) -> None:
    fault = f"kind: kill, every_num_phases: {EVERY_NUM_STEPS}, within_requests: 4"
    lines = trained(tmp_path, f"serving.faults={{it: {{{fault}}}}}")
    assert sum(line["rollout/lost_engines"] for line in lines) == NUM_KILLS
    replaced = sum(line["rollout/replaced_engines"] for line in lines)
    assert NUM_KILLS - 1 <= replaced <= NUM_KILLS  # the last may come after the end
    assert sum(line["rollout/repeated_requests"] for line in lines) >= NUM_KILLS


@pytest.mark.nightly
@pytest.mark.timeout(FAULTY_TIMEOUT_S + 20)
@pytest.mark.shows("4.22")
def test_a_run_loses_no_sample_to_killed_routers(tmp_path: Path) -> None:
    has_ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_routers, tmp_path, has_ended)
        try:
            lines = trained(tmp_path, "serving.router=sglang")
        finally:
            has_ended.set()
    assert killing.result() == NUM_KILLS
    restarts = sum(line["rollout/router_restarts"] for line in lines)
    assert NUM_KILLS - 1 <= restarts <= NUM_KILLS  # one within a start of another counts once
    assert sum(line["rollout/lost_engines"] for line in lines) == 0


def trained(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a run of which no prompt is lost or counts twice."""
    lines = require_agreement(
        folder,
        *("serving=own", *SMALL, VARIED, "eval.every_num_steps=0"),
        *("checkpoint.every_num_steps=1", "cluster.call_timeout_s=300", *overrides),
        num_steps=NUM_FAULTY_STEPS,
        timeout_s=FAULTY_TIMEOUT_S,
    )
    assert [line["data/prompts"] for line in lines] == [
        4 * (n + 1) for n in range(NUM_FAULTY_STEPS)
    ]
    return lines


def kill_routers(folder: Path, has_ended: threading.Event) -> int:
    """Kill the router at a random moment of every third step; return how often."""
    num_kills = 0
    metrics = folder / "run" / "metrics.jsonl"
    while num_kills < NUM_KILLS and not has_ended.wait(0.05):
        num_steps = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
        if num_steps >= EVERY_NUM_STEPS * (num_kills + 1) - 1:
            has_ended.wait(random.uniform(0.0, 2.0))
            for process in processes_of(folder, "sglang::router"):
                process.kill()
                num_kills += 1
    return num_kills


SMALL_RUN = (
    *(override for override in SMALL if override.startswith("model.")),
    *("trainer.num_prompts_per_step=4", "eval.every_num_steps=0", "checkpoint.every_num_steps=0"),
)


COLOCATED = ("serving.colocated=true", "rollout.sleep=true", "rollout.num_slots=64")
HALVES = "a: {num_devices: 1, worker_type: prefill}, b: {num_devices: 1, worker_type: decode}"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(2 * TIMEOUT_S + 20)
@pytest.mark.shows("2.1", "2.2", "4.2", "4.3")
@pytest.mark.parametrize(
    ("groups", "num_devices", "num_ranks"),
    [
        pytest.param(
            "one: {num_devices: 1}, two: {num_devices: 2, devices_per_engine: 2}",
            *(3, 3),
            id="engines of one and of two ranks",
            marks=WITHOUT_NCCL,
        ),
        pytest.param(HALVES, 2, 2, id="a pair of the ranks", marks=WITHOUT_MOONCAKE),
        pytest.param(
            f"fused: {{num_devices: 1}}, {HALVES}",
            *(3, 1),
            id="a pair beside an engine of a rank",
            marks=[WITHOUT_MOONCAKE, pytest.mark.nightly],
        ),
    ],
)
def test_groups_of_any_kind_sleep_with_the_trainer(
    tmp_path: Path, groups: str, num_devices: int, num_ranks: int
) -> None:
    before = servers_below()
    lines = train(
        tmp_path / "run",
        *(*COLOCATED, "trainer.num_prompts_per_step=6", "trainer.num_steps=3"),
        *("rollout=sglang", "eval.every_num_steps=0", "checkpoint.every_num_steps=0"),
        f"serving.models={{policy: {{groups: {{{groups}}}}}}}",
        f"serving.num_devices_per_node={num_devices}",
        f"cluster.num_ranks_per_node={num_ranks}",
        *("rollout.start_timeout_s=150", "cluster.start_timeout_s=160"),
    )
    assert_agrees(lines, num_steps=3)
    wait_until(lambda: servers_below() == before)
    assert [line["rollout/lost_engines"] for line in lines] == [0, 0, 0]
    assert all("time/release_s" in line for line in lines)


@pytest.mark.timeout(2 * TIMEOUT_S + 20)
@pytest.mark.nightly
@pytest.mark.shows("4.1", "4.3")
@pytest.mark.parametrize("recipe", ["cpu/colocated", "cpu/mixed"])
def test_servers_of_ranks_agree_with_the_trainer(tmp_path: Path, recipe: str) -> None:
    lines = require_agreement(
        tmp_path, f"recipes={recipe}", *SMALL_RUN, num_steps=3, timeout_s=2 * TIMEOUT_S
    )
    assert [line["rollout/repeated_requests"] for line in lines] == [0, 0, 0]
