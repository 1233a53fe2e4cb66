"""Runs whose responses are conversations: the same step, with other programs on the ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest

from benchmarks.child import to_yaml
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.env import cache_dir
from hybridrl.errors import AgentError
from hybridrl.run.launch import run
from hybridrl.run.record import RunFolder
from hybridrl.run.starter import ensure_starter
from tests.end_to_end.small import read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

ENVIRONMENT = Path(__file__).parents[1] / "agents" / "environments_file.py"
OWN = Path(__file__).parents[1] / "agents" / "own_agents.py"
REWARD = Path(__file__).with_name("varied_reward.py")
SMALL = (
    *("agent=tool_calls", f"agent.loop={OWN}:AsksTwice", "data=calculator"),
    *("data.num_task_rows=64", f"reward.function={REWARD}:varied"),
    *("rollout.max_response_tokens=64", "model.starter.num_warmup_steps=60"),
    *("data.max_prompt_tokens=32", "rollout.temperature=0.5", "critic.num_warmup_steps=0"),
    *("trainer.num_steps=2", "eval.every_num_steps=0"),
)
MEGATRON = ("actor=megatron", "cluster.worker_setup_hook=tests.megatron.stand_ins.install")


def _train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    config = small_config(folder, *SMALL, *overrides)
    run(config, resolved_yaml=to_yaml(config))
    return [step for step in read_metrics(folder) if "loss/policy" in step]


def test_conversations_are_trained_and_can_be_read(tmp_path: Path) -> None:
    steps = _train(tmp_path, "cluster.num_ranks_per_node=2")

    for step in steps:
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
        assert step["agent/turns/mean"] > 1
        assert step["agent/tool_error_fraction"] == 0
    assert max(step["policy/grad_norm"] for step in steps) > 0
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [turn for line in lines for turn in json.loads(line).get("turns", ())]
    assert {"role": "tool", "text": "t:7<|end|>a:", "num_tokens": 6} in turns
    call = {"name": "calculator", "arguments": '{"expression": "0+7"}', "is_error": False}
    assert [call] in [turn.get("calls") for turn in turns]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<div class="turn"><div class="soft">tool, 6 tokens, no loss</div>' in page
    assert "t:7&lt;|end|&gt;a:" in page
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    for name in ("conversation", "turn", "tool"):
        spans = [(event["pid"], event["tid"]) for event in events if event["name"] == name]
        assert len({pid for pid, _ in spans}) == 2  # ranks
        assert all(tracks[span].startswith("conversation ") for span in spans)


def test_conversations_that_break_off_are_not_learned_from(tmp_path: Path) -> None:
    breaking = f"agent.loop={OWN}:BreaksOff"
    steps = _train(tmp_path / "run", breaking, "algorithm=ppo", "agent.max_failed_fraction=0.9")

    for step in steps:
        assert 0 < step["agent/ended_by_error_fraction"] == step["reward/left_out_fraction"] < 1
        assert step["rollout/truncated_fraction"] < 1
    assert max(step["policy/grad_norm"] for step in steps) > 0
    lines = (tmp_path / "run/samples.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [turn for line in lines for turn in json.loads(line).get("turns", ())]
    reasons = {turn["text"] for turn in turns if turn["role"] == "failure"}
    assert {reason.partition(" (")[0] for reason in reasons} == {
        "ConnectionError: the tool's server is away"
    }

    with pytest.raises(AgentError, match=r"the tool's server is away.*max_failed_fraction=0\.1"):
        _train(tmp_path / "ended", breaking, "agent.max_failed_fraction=0.1")


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=ppo",),
        pytest.param(("algorithm=reinforce_plus_plus",), marks=pytest.mark.nightly),
        pytest.param(("lora=default",), marks=pytest.mark.nightly),
        pytest.param(MEGATRON, marks=pytest.mark.nightly),
        pytest.param(("algorithm=remax", "rollout.sleep=true"), marks=pytest.mark.nightly),
    ],
    ids="-".join,
)
def test_conversations_train_with(overrides: tuple[str, ...], tmp_path: Path) -> None:
    steps = _train(tmp_path, *overrides)

    assert steps[-1]["agent/appended_tokens/mean"] > 0
    assert steps[-1]["policy/sampler_mismatch_nats/mean"] < 1e-5
    assert max(step["policy/grad_norm"] for step in steps) > 0


class Silent:
    """Shows no progress."""

    def phase(self, name: str) -> None:
        pass


REWRITING = (
    "{% for m in messages %}{{ m.role[0] }}:{{ '~' if m.role == 'assistant' and not loop.last }}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""A chat template that shows the model earlier turns with a sign before each."""


def _make_rewriting(folder: Path) -> Path:
    starter = ensure_starter(
        small_config(folder, *SMALL), cache=cache_dir(), record=cast(RunFolder, Silent())
    )
    shutil.copytree(starter, folder / "model")
    tokenizer = load_tokenizer(folder / "model", needs_chat_template=True)
    tokenizer.chat_template = REWRITING
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("ppo", marks=pytest.mark.nightly)])
def test_rewritten_histories_are_trained_as_the_model_read_them(
    algorithm: str, tmp_path: Path
) -> None:
    model = _make_rewriting(tmp_path)
    steps = _train(
        tmp_path / "run",
        *("model.starter=null", f"model.path={model}", f"algorithm={algorithm}"),
        *(f"agent.loop={OWN}:GoesOn", "agent.tools=[]", "agent.history=branch"),
        *("cluster.num_ranks_per_node=2", "rollout.max_response_tokens=96"),
        *("algorithm.num_minibatches=2", "algorithm.old_logprobs=recompute", "trainer.num_steps=3"),
    )

    assert len(steps) == 3
    for step in steps:
        assert step["agent/turns/mean"] == step["agent/sequences/mean"] > 1
        assert step["policy/sampler_mismatch_nats/max"] < 1e-4
        assert step["policy/grad_norm"] > 0


@pytest.mark.parametrize(
    "algorithm", ["turn_ppo", pytest.param("turn_grpo", marks=pytest.mark.nightly)]
)
def test_an_environment_rewards_turns(algorithm: str, tmp_path: Path) -> None:
    played = ("agent.loop=environment", f"agent.environment={ENVIRONMENT}:Counts", "agent.tools=[]")
    steps = _train(tmp_path, *played, f"algorithm={algorithm}", "reward.function=agent")

    assert all(step["agent/ended_by_error_fraction"] == 0 for step in steps)
    assert max(step["agent/turns/mean"] for step in steps) > 1
    assert max(step["reward/mean"] for step in steps) > 1
    assert max(step["policy/grad_norm"] for step in steps) > 0
    assert max(step["policy/sampler_mismatch_nats/mean"] for step in steps) < 1e-5
    samples = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert "\\n\\n7" in samples or "8<|end|>" in samples
