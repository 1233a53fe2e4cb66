from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from hybridrl.checkpoint.compare import compare_runs
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.errors import WorkerDiedError
from tests.end_to_end.runs import assert_same_weights, prompts_in_order, samples_of, train
from tests.end_to_end.small import VARIED, read_metrics, small_config
from tests.end_to_end.test_faults import run_into
from tests.serving.processes import engine_processes, processes_with
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster")

SIX_STEPS = (
    *("serving=own", "trainer.num_steps=6", "eval.every_num_steps=0", "rollout.num_slots=4"),
    VARIED,
)
EACH_THIRD = "every_num_phases: 3, within_requests: 4"
LEARNING = ("reward", "policy", "length", "data", "rollout/truncated", "rollout/empty")


def learning_of(folder: Path) -> list[dict[str, float]]:
    """What a run has learned from, and how: equal if not one sample differs."""
    return [
        {name: value for name, value in line.items() if name.startswith(LEARNING)}
        for line in read_metrics(folder)
    ]


def require_equal(folder: Path, expected: Path) -> None:
    assert learning_of(folder) == learning_of(expected)
    assert samples_of(folder) == samples_of(expected)
    assert_same_weights(folder, expected)


def total(folder: Path, name: str) -> float:
    return sum(line.get(name, 0.0) for line in read_metrics(folder))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder, *SIX_STEPS, "serving.weights=broadcast")
    return folder


def test_engines_beside_the_ranks_change_no_bit_of_a_run(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *SIX_STEPS, "serving=none")
    # Other batches round the sampler's own log-probs differently, and nothing learns from those.
    of_sampler = ("policy/sampler_", "policy/effective_sample")
    lines, expected = (
        [{k: v for k, v in line.items() if not k.startswith(of_sampler)} for line in of_run]
        for of_run in (learning_of(folder), learning_of(undisturbed))
    )
    assert lines == expected
    assert_same_weights(folder, undisturbed)
    of_engines = read_metrics(undisturbed)
    assert [line["policy/version"] for line in of_engines] == [1, 2, 3, 4, 5, 6]
    assert all(line["memory/synced_bytes"] > 0 for line in of_engines)
    assert [line["rollout/lost_engines"] for line in of_engines] == [0] * 6


def test_a_run_that_sends_changes_alone_learns_the_same_though_engines_are_killed(
    tmp_path: Path,
) -> None:
    small = ("trainer.num_steps=4", "rollout.dtype=bfloat16", "actor.optimizer.lr=1e-6")
    common = (*SIX_STEPS, *small)
    train(tmp_path / "all", *common)
    kills = f"serving.faults={{kills: {{kind: kill, {EACH_THIRD}}}}}"
    train(tmp_path / "changes", *common, "serving.weight_deltas=true", kills)
    require_equal(tmp_path / "changes", tmp_path / "all")
    first, *later = (line["memory/synced_bytes"] for line in read_metrics(tmp_path / "changes"))
    assert max(later) < 0.3 * first
    assert total(tmp_path / "changes", "rollout/replaced_engines") >= 1


@pytest.mark.shows("4.15")
def test_a_run_whose_engines_are_killed_learns_the_same_and_tells_why(
    undisturbed: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "run"
    train(killed, *SIX_STEPS, f"serving.faults={{kills: {{kind: kill, {EACH_THIRD}}}}}")
    require_equal(killed, undisturbed)
    assert [line["rollout/lost_engines"] for line in read_metrics(killed)] == [0, 0, 1, 0, 0, 1]
    assert total(killed, "rollout/repeated_requests") > 0
    assert 1 <= total(killed, "rollout/replaced_engines") <= 2  # the last may come after the end
    assert total(killed, "time/replace_engine_s") > 0
    log = (killed / "servers" / "manager.txt").read_text()
    assert len(re.findall(r"an engine was lost: model=policy engine=\d reason=.*gone", log)) == 2
    assert re.search(r"an engine was replaced: model=policy engine=\d took_s=\d+\.\d", log)
    engines = [(killed / "servers" / f"policy-engine-{number}.txt").is_file() for number in (0, 1)]
    assert engines == [True, True]
    events = json.loads((killed / "trace.json").read_text())
    lost = next(event for event in events if event["name"] == "engine lost")
    assert lost["dur"] > 0
    assert "gone" in lost["args"]["reason"]
    page = (killed / "report.html").read_text()
    assert "Rollout engines were lost" in page
    assert "an engine was lost: model=policy" in page


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["stop", "cut", "error", "tokens", "logprobs"])
def test_a_run_whose_engines_hang_or_err_learns_the_same(
    kind: str, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    faults = f"serving.faults={{some: {{kind: {kind}, {EACH_THIRD}}}}}"
    train(folder, *SIX_STEPS, faults, "serving.health_timeout_s=2")
    require_equal(folder, undisturbed)
    assert total(folder, "rollout/lost_engines") == 2
    assert 1 <= total(folder, "rollout/replaced_engines") <= 2
    wait_until(lambda: not engine_processes())


SMALL = ("eval.every_num_steps=0", "rollout.num_slots=4", VARIED)
COLOCATED = (*SMALL, "recipes=cpu/colocated", "trainer.num_steps=4")
MIXED = (*SMALL, "recipes=cpu/mixed", "trainer.num_steps=3")


def faults(kind: str, *, every: int) -> str:
    return f"serving.faults={{it: {{kind: {kind}, every_num_phases: {every}, within_requests: 4}}}}"


def require_good(lines: list[dict[str, float]], *, num_steps: int) -> None:
    """No prompt is lost or doubled, and each token is of the newest weights."""
    assert [line["data/prompts"] for line in lines] == [4 * (n + 1) for n in range(num_steps)]
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines)
    assert [line["policy/version"] for line in lines] == list(range(1, num_steps + 1))


@pytest.mark.shows("4.1", "4.15")
def test_a_lost_engine_of_a_rank_is_back_in_the_next_phase(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", *COLOCATED, faults("error", every=2))
    require_good(lines, num_steps=4)
    assert [line["rollout/lost_engines"] for line in lines] == [0, 1, 0, 1]
    assert [line["rollout/replaced_engines"] for line in lines] == [0, 0, 1, 0]
    assert [line["rollout/repeated_requests"] > 0 for line in lines] == [False, True, False, True]
    assert all(line["time/restart_s"] > 0 for line in lines[1::2])


@pytest.mark.shows("4.3")
def test_own_engines_serve_beside_those_of_the_ranks(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", *MIXED)
    require_good(lines, num_steps=3)
    assert [line["rollout/lost_engines"] for line in lines] == [0, 0, 0]
    wait_until(lambda: not engine_processes())


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [COLOCATED, MIXED], ids=["colocated", "mixed"])
def test_a_killed_manager_starts_the_workers_again(recipe: tuple[str, ...], tmp_path: Path) -> None:
    restarts = ("checkpoint.every_num_steps=1", "checkpoint.max_restarts=4")
    lines = train(tmp_path / "run", *recipe, *restarts, faults("kill_manager", every=3))
    require_good(lines, num_steps=len(lines))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "sample: the rollout manager is gone" in log
    assert "workers are started again" in log


NUM_STEPS, NUM_PROMPTS = 6, 4
AHEAD = (
    *("serving=own", "rollout.num_slots=4", f"trainer.num_steps={NUM_STEPS}"),
    *("algorithm.rollout_correction=importance", "eval.every_num_steps=4"),
    f"tracking.num_samples_per_step={NUM_PROMPTS}",
    VARIED,
)


def steps_of(folder: Path) -> list[dict[str, float]]:
    return [line for line in read_metrics(folder) if line["step"]]


def require_each_prompt_once(folder: Path, *keys: str) -> None:
    """The prompts that a synchronous run draws in as many steps, each in one step."""
    drawn = prompts_in_order(small_config(folder, *AHEAD, *keys), NUM_STEPS * NUM_PROMPTS)
    samples = samples_of(folder, "train")
    assert Counter(each["prompt"] for each in samples) == Counter(drawn)  # two may be equal
    assert set(Counter(each["step"] for each in samples).values()) == {NUM_PROMPTS}


def require_bounded(folder: Path, max_staleness: int) -> None:
    for number, line in enumerate(steps_of(folder)):
        assert line["rollout/staleness_steps/max"] <= min(number, max_staleness)
        assert line["time/wait_for_groups_s"] >= 0
        assert line["time/engines_idle_s"] >= 0
        all_tokens = line["throughput/tokens_per_s"] * line["time/step_s"]
        assert line["throughput/response_tokens_per_s"] * line["time/step_s"] < all_tokens
        assert line["rollout/open_groups"] == (
            min(max_staleness, NUM_STEPS - 1 - number) * NUM_PROMPTS
        )


@pytest.mark.parametrize(
    ("max_staleness", "on_update"),
    [(2, "interrupt"), pytest.param(1, "finish", marks=pytest.mark.nightly)],
)
def test_a_run_samples_ahead_while_its_engines_are_killed(
    max_staleness: int, on_update: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    keys = (
        *(f"trainer.max_staleness={max_staleness}", f"serving.on_update={on_update}"),
        "serving.faults={kills: {kind: kill, every_num_phases: 2, within_requests: 3}}",
    )
    train(folder, *AHEAD, *keys)
    require_bounded(folder, max_staleness)
    require_each_prompt_once(folder)
    lines = steps_of(folder)
    assert max(line["rollout/staleness_steps/max"] for line in lines) > 0
    assert sum(line["rollout/lost_engines"] for line in lines) >= 1
    assert [line["step"] for line in lines if "eval/reward/mean" in line] == [4, 6]


def test_finished_groups_outlive_a_killed_manager(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    faults = "serving.faults={it: {kind: kill_manager, every_num_phases: 4, within_requests: 1}}"
    restarts = ("checkpoint.every_num_steps=1", "checkpoint.max_restarts=4")
    train(folder, *AHEAD, "trainer.max_staleness=2", *restarts, faults)
    require_each_prompt_once(folder)
    lines = {line["step"]: line for line in steps_of(folder)}
    assert max(line["rollout/staleness_steps/max"] for line in lines.values()) <= 2
    wait_until(lambda: not engine_processes())  # those of dead managers ended with them
    log = (folder / "log.txt").read_text()
    assert "sample: the rollout manager is gone" in log
    kept = re.findall(r"(\d+) finished groups of the checkpoint are learned from", log)
    resumed = re.findall(r"going on from the checkpoint of step (\d+)", log)
    of_old = [int(step) for step, number in zip(resumed, kept, strict=True) if int(number)]
    assert of_old
    assert {each.what: each.differences for each in compare_runs(folder, folder)}["weights"] == ()
    # Without them, all rows of this step would be of the newest weights.
    assert all(lines[step + 1]["rollout/staleness_steps/max"] > 0 for step in of_old)


BESIDE = (
    *(*AHEAD, "trainer.max_staleness=2", "eval.in_background=true", "eval.every_num_steps=2"),
    *("eval.temperature=1", "eval.num_responses_per_prompt=2", "actor.optimizer.lr=1e-2"),
    "eval.max_response_tokens=16",
    *("checkpoint.every_num_steps=2", "checkpoint.keep_last=9", "checkpoint.max_restarts=2"),
)
"""Sampled, with versions that differ: of the wrong weights no evaluation would have the answers."""


def answers_of(folder: Path, step: int) -> list[str]:
    """To held-out prompts, after a step."""
    return [each["response"] for each in samples_of(folder, "eval") if each["step"] == step]


def require_the_scores_of_the_checkpoints(folder: Path, *steps: int, again: int) -> None:
    """Each background evaluation judges; that ``again`` is the same of ``mode=eval``, all of it."""
    lines = {int(line["step"]): line for line in read_metrics(folder) if "eval/reward/mean" in line}
    assert list(lines) == [0, *steps]
    shelf = CheckpointStore(folder / "checkpoints")
    checkpoints = {step: shelf.at(step) for step in steps}
    for step, checkpoint in checkpoints.items():
        assert checkpoint is not None
        assert checkpoint.manifest.score == lines[step]["eval/reward/mean"]
    source = f"eval.checkpoint={folder}/checkpoints/step-{again:09}"
    kept = ("eval.temp", "eval.num", "eval.max", "tracking")
    keys = (key for key in BESIDE if key.startswith(kept))
    alone = folder.with_name("alone")
    (line,) = train(alone, "mode=eval", source, *keys, VARIED)
    assert line["eval/reward/mean"] == lines[again]["eval/reward/mean"]
    assert answers_of(folder, again) == [each["response"] for each in samples_of(alone, "eval")]


def test_training_goes_on_beside_an_evaluation_of_the_weights_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, *BESIDE)
    steps = [line["step"] for line in read_metrics(folder)]
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6]
    order = list(dict.fromkeys((each["split"], each["step"]) for each in samples_of(folder)))
    assert order == [
        *(("train", 1), ("eval", 0), ("train", 2), ("train", 3), ("eval", 2)),
        *(("train", 4), ("train", 5), ("eval", 4), ("train", 6), ("eval", 6)),
    ]
    assert len({str(answers_of(folder, step)) for step in (0, 2, 4, 6)}) == 4
    longest = [line.get("eval/length/response_tokens/max", 16) for line in read_metrics(folder)]
    assert longest == [16] * len(longest)
    require_each_prompt_once(folder)
    require_the_scores_of_the_checkpoints(folder, 2, 4, 6, again=4)


def test_an_evaluation_that_a_kill_ended_is_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # The third phase of a manager is the step beside an evaluation: 3, and 5 after the restart.
    train(folder, *BESIDE, "trainer.num_steps=5", faults("kill_manager", every=3))
    log = (folder / "log.txt").read_text()
    assert re.findall(r"going on from the checkpoint of step (\d+)", log) == ["2", "4"]
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 2, 3, 4, 4, 5]
    require_the_scores_of_the_checkpoints(folder, 2, 4, 5, again=2)


@pytest.mark.nightly
def test_open_responses_lose_their_tokens_to_new_weights(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    slow = ("rollout.num_slots=1", "rollout.max_response_tokens=96")  # so responses are open
    keys = ("trainer.max_staleness=2", "serving.on_update=abort", *slow)
    train(folder, *AHEAD, *keys)
    require_bounded(folder, 2)
    require_each_prompt_once(folder, *slow)  # numbers are as long as responses
    lines = steps_of(folder)
    assert sum(line.get("rollout/aborted_responses", 0.0) for line in lines) > 0
    assert sum(line.get("rollout/aborted_tokens", 0.0) for line in lines) > 0
    assert not any("rollout/interrupted_responses" in line for line in lines)
    assert all("rollout/aborted_tokens" in line for line in lines)


@pytest.mark.nightly
@pytest.mark.shows("4.22")
@pytest.mark.parametrize(
    ("recipe", "phase"),
    [
        *((COLOCATED, phase) for phase in ("generate", "update")),
        *((MIXED, phase) for phase in ("generate", "update")),
        ((*AHEAD, "trainer.max_staleness=2", "rollout.max_response_tokens=24"), "update"),
    ],
    ids=["colocated", "colocated-update", "mixed", "mixed-update", "ahead-update"],
)
def test_a_killed_rank_ends_the_run_by_name_and_leaves_no_process(
    recipe: tuple[str, ...], phase: str, tmp_path: Path
) -> None:
    error = run_into(tmp_path / "run", *recipe, at=phase, number=signal.SIGKILL)
    assert isinstance(error, WorkerDiedError)
    assert "killed by signal 9" in str(error) or "without a word" in str(error)
    assert phase in error.__notes__[-2]
    of_the_run = ("ActorRolloutWorker", "RolloutManager", "RolloutProcess")
    wait_until(lambda: not processes_with(*of_the_run))
