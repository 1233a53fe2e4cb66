"""A run whose rollouts were written is trained again without a rollout engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.checkpoint.compare import compare_runs
from hybridrl.errors import ReplayError
from tests.end_to_end.runs import TIMED, metrics_of, train
from tests.end_to_end.small import VARIED, read_metrics

pytestmark = pytest.mark.usefixtures("ray_cluster")

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
def test_a_replay_is_bit_by_bit_the_recordedtrain(recorded: Path, tmp_path: Path) -> None:
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
