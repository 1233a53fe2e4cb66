from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.child import to_yaml
from hybridrl.checkpoint.compare import compare_runs
from hybridrl.checkpoint.compare import main as compare
from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.env import ROOT
from hybridrl.errors import (
    CheckpointError,
    RemoteCallError,
    ReplayError,
    RewardError,
    RunFolderError,
)
from hybridrl.run.modes.check import check
from tests.end_to_end.runs import (
    TIMED,
    assert_same_run,
    assert_same_weights,
    go_back_to,
    metrics_of,
    train,
)
from tests.end_to_end.small import VARIED, change_one_bit, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

TWO_RANKS = (
    *("cluster.num_ranks_per_node=2", "rollout.sleep=true"),
    *("algorithm.num_minibatches=2", "algorithm.old_logprobs=recompute"),
)
SAVING = ("checkpoint.every_num_steps=2", "actor.optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """Two runs that nobody breaks off: of 5 steps, and of 2 steps."""
    folder = tmp_path_factory.mktemp("made")
    _run(folder / "whole", "trainer.num_steps=5")
    _run(folder / "begun", "trainer.num_steps=2")
    return folder


@pytest.fixture
def whole(made: Path) -> Path:
    return made / "whole"


@pytest.fixture
def begun(made: Path, tmp_path: Path) -> Path:
    """A run with a checkpoint of step 2, for a test to go on with."""
    return shutil.copytree(made / "begun", tmp_path / "run")


@pytest.mark.shows("R2.1", "R6.1")
def test_a_run_in_two_parts_is_bit_by_bit_the_run_in_one(
    begun: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(begun, "trainer.num_steps=5")
    assert_same_run(begun, whole)
    assert_same_weights(begun, whole)
    assert compare(whole, begun) == 0
    assert "same: optimizer, " in capsys.readouterr().out
    for name, path in (
        ("weights", max((begun / "checkpoints").glob("step-*/actor/*"))),
        ("samples", begun / "samples.jsonl"),
        ("metrics", begun / "metrics.jsonl"),
    ):
        change_one_bit(path)
        assert compare(whole, begun) == 1
        assert f"DIFFERENT: {name}, " in capsys.readouterr().out


@pytest.mark.shows("R6.2")
@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_fifty_random_kills_in_a_row_end_bit_by_bit_or_with_a_named_error() -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", "50", "--seed", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2900)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.shows("R3.1")
def test_a_rank_that_is_killed_is_started_again_and_no_bit_is_different(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", "trainer.num_steps=5", *TWO_RANKS)
    folder = tmp_path / "killed"
    killer = threading.Thread(target=_kill_a_rank, args=(folder / "metrics.jsonl",))
    killer.start()
    _run(folder, "trainer.num_steps=5", *TWO_RANKS)
    killer.join()
    told = (folder / "log.txt").read_text()
    assert "workers are started again and continue from step" in told
    assert "WorkerDiedError" in told
    assert_same_run(folder, whole)


@pytest.mark.shows("R2.2")
def test_onto_another_number_of_ranks_a_run_goes_on_and_says_that_bits_may_differ(
    begun: Path, whole: Path
) -> None:
    _run(begun, "trainer.num_steps=5", "cluster.num_ranks_per_node=2")
    told = (begun / "log.txt").read_text()
    assert "not bitwise identical: cluster.num_ranks_per_node: '1' there, '2' here" in told
    assert [line["step"] for line in read_metrics(begun)] == [0, 1, 2, 3, 4, 5]
    ours, theirs = (_drawn(folder) for folder in (begun, whole))
    assert ours == theirs  # no prompt lost or doubled


def test_a_check_says_where_the_run_in_the_folder_begins_or_why_it_cannot(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*SAVING, "mode=check", "trainer.num_steps=5")
    check(small_config(begun, *more))
    assert "from the checkpoint of step 2\n" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"actor.optimizer.lr: 0.01 there, 0.02 here"):
        check(small_config(begun, *more, "actor.optimizer.lr=2e-2"))
    check(small_config(begun / "new", *more))
    assert "resume " not in capsys.readouterr().out


@pytest.mark.shows("R2.11")
def test_a_finished_run_says_so_and_starts_nothing(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*")}
    _run(begun, "trainer.num_steps=2")
    assert "is finished: step 2 of 2. Raise trainer.num_steps" in capsys.readouterr().out
    _run(begun, "trainer.num_steps=1")
    assert "is finished: step 2 of 1." in capsys.readouterr().out
    check(small_config(begun, *SAVING, "mode=check", "trainer.num_steps=2"))
    assert "is finished: step 2 of 2." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in begun.rglob("*")} == before
    shutil.rmtree(begun / "hf")  # killed before its export
    _run(begun, "trainer.num_steps=2")
    assert (begun / "hf" / "config.json").is_file()


@pytest.mark.shows("R1.6", "R2.4")
def test_a_torn_checkpoint_is_named_and_what_came_after_the_one_before_it_is_done_again(
    whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder / "hf")  # it ended before its export, or nobody would look
    torn = folder / "checkpoints" / "step-000000005"
    shard = next(torn.glob("actor/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "reward/me')
    _run(folder, "trainer.num_steps=5")
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2, 3, 4, 5]
    assert_same_run(folder, whole)
    log = (folder / "log.txt").read_text()
    assert "step-000000005 is corrupt: the bytes of actor/rank-00000" in log
    assert "going on from the checkpoint of step 4" in log


CHANGED = ("trainer.num_steps=3", "actor.optimizer.weight_decay=0.5")


@pytest.fixture(scope="module")
def accepted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that lost lines and goes on with other settings, both refused at first."""
    folder = shutil.copytree(made / "begun", tmp_path_factory.mktemp("accepted") / "run")
    metrics = folder / "metrics.jsonl"
    first, *_ = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + '{"step": 1, "rew')
    return _run(folder, *CHANGED, "checkpoint.accept_changes=true")


@pytest.mark.shows("R2.6")
def test_other_settings_are_refused_key_by_key_unless_accepted(begun: Path, accepted: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weight_decay: 0.0 there, 0.5 here.*\n.*accept"):
        _run(begun, *CHANGED)
    log = (accepted / "log.txt").read_text()
    assert "change that was accepted: actor.optimizer.weight_decay" in log


OWN = """
def scored(responses): return [float(len(text)) for text in responses]
def loss(current_logprobs_T, advantages_T): return -advantages_T * current_logprobs_T
"""


@pytest.mark.shows("R2.7")
def test_changed_own_functions_and_teacher_are_refused(made: Path, tmp_path: Path) -> None:
    mine, teacher = tmp_path / "mine.py", shutil.copytree(made / "begun/hf", tmp_path / "teacher")
    mine.write_text(OWN)
    overrides = ["algorithm=distillation", f"algorithm.teacher_path={teacher}"]
    overrides += (f"reward.functions.mine.function={mine}:scored", "reward.function=null")
    overrides += (f"algorithm.policy_loss={mine}:loss", "eval.every_num_steps=0")
    overrides += ("trainer.export_hf=false",)
    folder = _run(tmp_path / "run", "trainer.num_steps=1", *overrides)
    mine.write_text(OWN.replace("-advantages_T", "-2 * advantages_T"))
    change_one_bit(teacher / "model.safetensors")
    names = ("algorithm.teacher_path", "algorithm.policy_loss", "reward.functions.mine.function")
    with pytest.raises(CheckpointError, match=r"files of .*accept_changes=true") as refused:
        _run(folder, "trainer.num_steps=2", *overrides)
    assert [name for name in names if f"{name}: " not in str(refused.value)] == []


@pytest.mark.shows("R2.5")
def test_a_run_that_lost_lines_of_its_metrics_is_refused_unless_accepted(
    begun: Path, accepted: Path
) -> None:
    metrics = begun / "metrics.jsonl"
    first, *_ = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + '{"step": 1, "rew')
    with pytest.raises(RunFolderError, match=r"lost lines .* step 2: metrics\.jsonl has \d+ bytes"):
        _run(begun, "trainer.num_steps=3")
    assert metrics.read_text() == first + '{"step": 1, "rew'
    assert [line["step"] for line in read_metrics(accepted)] == [0, 3]
    assert "change that was accepted: metrics.jsonl has" in (accepted / "log.txt").read_text()


@pytest.mark.shows("R2.8")
def test_a_checkpoint_of_another_model_is_refused_by_tensor_names(begun: Path) -> None:
    other = ("trainer.num_steps=3", "model.starter.num_layers=2", "checkpoint.accept_changes=true")
    with pytest.raises(RemoteCallError, match=r"another model: \d+ tensors missing.*layers\.1"):
        _run(begun, *other)


@pytest.mark.shows("R2.11")
def test_a_run_without_checkpoints_is_never_taken_up(begun: Path) -> None:
    shutil.rmtree(begun / "checkpoints")
    config = small_config(begun, *SAVING, "checkpoint.every_num_steps=0")
    (begun / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(RunFolderError, match=r"without checkpoints.*trainer\.overwrite=true"):
        _run(begun, "trainer.num_steps=2")


@pytest.mark.shows("R2.11")
def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(begun: Path) -> None:
    shutil.rmtree(begun / "checkpoints")
    (begun / "checkpoints" / "step-000000002.unfinished").mkdir(parents=True)
    _run(begun, "trainer.num_steps=1")
    assert [line["step"] for line in read_metrics(begun)] == [0, 1]
    log = (begun / "log.txt").read_text()
    assert "step-000000002.unfinished is deleted: it was not completed" in log
    assert "steps 1 to 2 are done again; their lines go" in log


FAILING = """
from pathlib import Path
def scored(responses):
    if Path("METRICS").read_text().count("\\n") == 3:
        raise OSError("a disk was lost")
    return [float(len(text) % 3) for text in responses]
"""


@pytest.mark.shows("R1.3")
def test_an_error_in_the_step_after_a_save_leaves_its_checkpoint_complete(tmp_path: Path) -> None:
    folder, mine = tmp_path / "run", tmp_path / "mine.py"
    mine.write_text(FAILING.replace("METRICS", str(folder / "metrics.jsonl")))
    with pytest.raises(RewardError, match="a disk was lost"):
        _run(folder, f"reward.function={mine}:scored")
    assert [line["step"] for line in read_metrics(folder)] == [0, 1, 2]
    assert CheckpointStore(folder / "checkpoints").steps() == [2]


Lines = list[dict[str, float]]


@pytest.mark.shows("R2.1")
@pytest.mark.parametrize(
    ("overrides", "is_meant"),
    [
        pytest.param(
            ("mode=sft", "trainer.num_prompts_per_step=8", "eval.every_num_steps=2"),
            lambda _: True,
            id="supervised",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("algorithm=ppo", "lora=default", "lora.rank=4", "critic.num_warmup_steps=1"),
            lambda _: True,
            id="a critic and an adapter",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            (
                *("algorithm=dapo", "algorithm.num_minibatches=2"),
                *("algorithm.max_sampling_rounds=3", "algorithm.group_filter=mean_within"),
                *("algorithm.group_filter_args.low=0.9", "algorithm.group_filter_args.high=1.6"),
                *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.01"),
                "algorithm.kl.target_nats=0.001",
            ),
            lambda steps: (
                max(step["groups/sampled"] for step in steps) > 4  # some groups were replaced
                and len({step["policy/kl_coefficient"] for step in steps}) == 3
            ),
            id="dynamic sampling and an adaptive KL",
        ),
        pytest.param(
            (
                *("agent=tool_calls", "agent.tool_format=pythonic", "data=calculator"),
                *("data.max_prompt_tokens=32", "rollout.max_response_tokens=64"),
                f"agent.loop={ROOT}/tests/agents/own_agents.py:TakesTurns",
                *("algorithm=rae", "reward.function=agent", "cluster.num_ranks_per_node=2"),
            ),
            lambda steps: (
                max(step["agent/tool_calls/mean"] for step in steps) > 0
                and len({step.get("reward/baseline/calculator_1") for step in steps}) > 1
            ),
            id="conversations of two players",
        ),
    ],
)
def test_a_run_of_each_kind_in_two_parts_is_bit_by_bit_the_run_in_one(
    tmp_path: Path, overrides: tuple[str, ...], is_meant: Callable[[Lines], bool]
) -> None:
    overrides = ("trainer.num_steps=3", VARIED, *overrides)
    whole = _run(tmp_path / "whole", *overrides)
    parts = _run(go_back_to(2, whole, tmp_path / "parts"), *overrides)
    assert is_meant([line for line in read_metrics(whole) if line["step"]])
    assert_same_run(parts, whole)
    assert_same_weights(parts, whole)


def _run(folder: Path, *overrides: str) -> Path:
    train(folder, *SAVING, *overrides)
    return folder


def _kill_a_rank(metrics: Path) -> None:
    """Wait for the third step's line, and kill the last of this process's ranks."""
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 4:
        time.sleep(0.01)
    below = psutil.Process().children(recursive=True)
    ranks = [process for process in below if process.name().startswith("ray::ActorRollout")]
    ranks[-1].kill()


def _drawn(folder: Path) -> object:
    found = CheckpointStore(folder / "checkpoints").newest()
    assert found is not None
    return found.manifest.run.sampler


FILTERED = (
    *("algorithm=dapo", "algorithm.max_sampling_rounds=3", VARIED, "cluster.num_ranks_per_node=2"),
    *("rollout.num_responses_per_prompt=2", "trainer.num_prompts_per_step=8"),
    *("rollout.sleep=true", "checkpoint.every_num_steps=1", "checkpoint.keep_last=3"),
    *("actor.optimizer.lr=1e-2", "algorithm.old_logprobs=recompute"),
)
_OF_ENGINES = ("rollout/slot_occupancy", "rollout/decode_steps", "rollout/prefix_cache")


def _metrics(folder: Path) -> list[dict[str, float]]:
    return metrics_of(folder, without=(*TIMED, *_OF_ENGINES))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """A run of 3 steps that may sample more than once a step, with evaluations."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    train(folder, *FILTERED, "rollout.dump=true")
    return folder


@pytest.mark.shows("4.19")
def test_a_replay_is_bit_by_bit_the_recorded_training(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    train(folder, *FILTERED, f"rollout.replay={recorded}")
    assert list(recorded.glob("rollouts/*-train-1.json")), "no step sampled twice"
    assert not any(f.differences for f in compare_runs(recorded, folder) if f.what == "weights")
    assert _metrics(folder) == _metrics(recorded)
    assert (folder / "samples.jsonl").read_bytes() == (recorded / "samples.jsonl").read_bytes()
    trace = (folder / "trace.json").read_text()
    assert '"sample"' not in trace
    assert '"sync"' not in trace


@pytest.mark.shows("4.20")
def test_rates_of_a_step_count_devices_and_the_longest_response(recorded: Path) -> None:
    for line in read_metrics(recorded)[1:]:
        rate = line["throughput/tokens_per_s"]
        assert line["throughput/tokens_per_device_s"] == pytest.approx(rate / 2)
        longest = line["length/response_tokens/max"]
        seconds = line["time/generate_s"]
        assert line["throughput/longest_response_tokens_per_s"] == pytest.approx(longest / seconds)
        seconds = line["time/sample_s"]
        assert line["throughput/longest_sampled_tokens_per_s"] == pytest.approx(longest / seconds)


@pytest.mark.shows("4.19")
def test_a_smaller_step_learns_from_head_and_tail(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    train(
        folder,
        *FILTERED,
        f"rollout.replay={recorded}",
        "trainer.num_prompts_per_step=4",
        "trainer.num_steps=1",
        "eval.every_num_steps=0",
    )
    (metrics,) = read_metrics(folder)
    assert metrics["groups/learned"] <= 4
    assert metrics["data/prompts"] % 8 == 0


@pytest.mark.shows("4.19")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.num_steps=5", r"no rollouts \(train\) of 2 steps: 4, 5; set trainer.num_steps=3"),
        ("eval.every_num_steps=1", r"no rollouts \(eval\) of 1 steps: 1"),
        ("trainer.num_prompts_per_step=16", "set trainer.num_prompts_per_step=8"),
        ("agent.max_turns=3", "agent.max_turns: 8 there, 3 here"),
    ],
)
def test_what_the_recorded_run_lacks_is_told_before_anything_starts(
    recorded: Path, tmp_path: Path, override: str, told: str
) -> None:
    with pytest.raises(ReplayError, match=told):
        train(tmp_path / "run", *FILTERED, f"rollout.replay={recorded}", override)
