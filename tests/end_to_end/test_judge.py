from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from tests.end_to_end.runs import train
from tests.serving.elsewhere import elsewhere, files_with
from tests.tiny_models import make_tiny_model

KEY = "a-secret-of-the-judge"

pytestmark = pytest.mark.usefixtures("ray_cluster")


OWN = ("groups: {m: {num_devices: 1}}", "serving.num_devices_per_node=2")


def judged(folder: Path, *overrides: str, servers: tuple[str, str] = OWN) -> list[dict[str, float]]:
    """The metrics of a run; the judge's last digit is the reward, a text without a digit has 5."""
    judge = make_tiny_model(folder / "judge", vocab_size=260)
    build_starter_tokenizer().save_pretrained(judge)
    keys, devices = servers
    return train(
        folder / "run",
        "serving.models={policy: {groups: {main: {num_devices: 1}}}, "
        f"judge: {{path: '{judge}', max_context_tokens: 40, {keys}}}}}",
        devices,
        "reward.function=null",
        "+reward.functions.right={function: exact_match, weight: 0.5}",
        "+reward.functions.judge={function: judge, args: {model: judge, max_tokens: 12, "
        r"template: '{prompt}{response}', pattern: '(\d)', highest: 9, missing_score: 5}}",
        *("model.starter.num_warmup_steps=0", "trainer.num_steps=2", *overrides),
    )


def require_judged(lines: list[dict[str, float]]) -> None:
    before, *steps = lines
    assert "eval/reward/mean" in before
    assert len(steps) >= 2
    for line in steps:
        assert line["reward/failed_fraction"] == 0.0
        assert 0.0 <= line["reward/unreadable_fraction"] <= 1.0
        mixed = 0.5 * line["reward/right/mean"] + line["reward/judge/mean"]
        assert line["reward/mean"] == pytest.approx(mixed)
        assert 0.0 < line["reward/judge/mean"] <= 9.0


@pytest.mark.shows("2.1", "2.2", "4.1", "4.3", "4.11")
def test_a_judge_on_a_device_of_the_trainer_sleeps_with_the_other_engines(tmp_path: Path) -> None:
    lines = judged(
        tmp_path, *("cluster.num_ranks_per_node=2", "serving.colocated=true", "rollout.sleep=true")
    )
    alone = judged(tmp_path / "alone", "cluster.num_ranks_per_node=2")
    for run in (lines, alone):
        require_judged(run)
    # Asleep it kept its weights, in all phases: the same texts get the same scores.
    scores = [[line["reward/judge/mean"] for line in steps] for _, *steps in (lines, alone)]
    assert scores[0] == scores[1]
    assert all(line["memory/weight_backup_bytes"] > 0 for line in lines[1:])
    assert all(line["policy/sampler_mismatch_nats/max"] < 1e-3 for line in lines[1:])


@pytest.mark.shows("4.23")
def test_a_judge_elsewhere_scores_and_its_key_is_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with elsewhere(key=KEY) as server:
        keys = f"urls: ['{server.url}'], key_variable: JUDGE_KEY"
        require_judged(judged(tmp_path, servers=(keys, "serving.num_devices_per_node=1")))
        assert server.num_responses > 20
    assert files_with("JUDGE_KEY", tmp_path / "run")
    assert files_with(KEY, tmp_path) == []


@pytest.mark.nightly
@pytest.mark.shows("4.1", "4.3", "4.11")
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="at once with the policy"),
        pytest.param(
            ("cluster.num_ranks_per_node=2", "serving.colocated=true", "rollout.sleep=true"),
            id="asleep on a device of the trainer",
        ),
    ],
)
def test_a_judge_of_sglang_scores(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    _, *steps = judged(tmp_path, "rollout=sglang", *overrides)
    assert [line["reward/failed_fraction"] for line in steps] == [0.0, 0.0]
    assert all(line["reward/judge/mean"] > 0.0 for line in steps)
