from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.env import ROOT
from hybridrl.errors import AgentError
from hybridrl.run.display import LiveView
from hybridrl.run.record import RunFolder
from hybridrl.run.starter import find_model
from tests.docs.blocks import blocks_of
from tests.end_to_end.runs import STAND_INS, train, turns_of
from tests.end_to_end.small import VARIED, read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

AGENTS = ROOT / "tests" / "agents"
ENVIRONMENT, OWN = AGENTS / "environments_file.py", AGENTS / "own_agents.py"
CALCULATOR = ("data=calculator", "data.max_prompt_tokens=32", "rollout.max_response_tokens=64")
SMALL = (
    *("agent=tool_calls", f"agent.loop={OWN}:AsksTwice", *CALCULATOR, VARIED),
    *("model.starter.num_warmup_steps=60", "rollout.temperature=0.5", "critic.num_warmup_steps=0"),
    *("trainer.num_steps=2", "eval.every_num_steps=0"),
)
MEGATRON = ("actor=megatron", STAND_INS)


def _train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The steps in which the policy learned."""
    lines = train(folder, *SMALL, *overrides)
    return [line for line in lines if "loss/policy" in line]


def test_conversations_are_trained_and_can_be_read(tmp_path: Path) -> None:
    # Its calculator, where the extra mcp is installed; test_resume.py has the built-in one.
    server = f'agent.tools=["mcp:{sys.executable} {AGENTS / "mcp_server.py"}"]'
    steps = _train(
        tmp_path, "cluster.num_ranks_per_node=2", *[server] * (find_spec("mcp") is not None)
    )

    for step in steps:
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
        assert step["agent/turns/mean"] > 1
        assert step["agent/tool_calls/mean"] > 1
        assert step["agent/tool_error_fraction"] == 0
    assert max(step["policy/grad_norm"] for step in steps) > 0
    turns = turns_of(tmp_path)
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
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
    assert max(step["policy/grad_norm"] for step in steps) > 0
    reasons = {turn["text"] for turn in turns_of(tmp_path / "run") if turn["role"] == "failure"}
    assert {reason.partition(" (")[0] for reason in reasons} == {
        "ConnectionError: the tool's server is away"
    }
    with pytest.raises(AgentError, match=r"the tool's server is away.*max_failed_fraction=0\.1"):
        _train(tmp_path / "ended", breaking, "agent.max_failed_fraction=0.1")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=reinforce_plus_plus",),
        ("lora=default",),
        MEGATRON,
        ("algorithm=remax", "rollout.sleep=true"),
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

    live = LiveView(0)


REWRITING = (
    "{% for m in messages %}{{ m.role[0] }}:{{ '~' if m.role == 'assistant' and not loop.last }}"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""A chat template that shows the model earlier turns with a sign before each."""


def _make_rewriting(folder: Path) -> Path:
    starter = find_model(small_config(folder, *SMALL), cast(RunFolder, Silent()))
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


LEARNING = (
    *("agent=tool_calls", "agent.tool_format=pythonic", *CALCULATOR),
    *("model.starter.hidden_size=128", "model.starter.num_layers=2"),
    "model.starter.num_warmup_steps=400",
    *("data.num_task_rows=2000", "actor.optimizer.lr=3e-4", "rollout.num_slots=128"),
    *("trainer.num_prompts_per_step=16", "rollout.num_responses_per_prompt=8"),
    *("trainer.num_steps=10", "eval.num_prompts=128", "eval.every_num_steps=10"),
    "eval.temperature=1.0",
)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run in which a model of two layers learned to call the calculator."""
    folder = tmp_path_factory.mktemp("learned") / "run"
    train(folder, *LEARNING)
    return folder


@pytest.mark.nightly
def test_a_small_model_learns_to_call_its_tool(learned: Path) -> None:
    before, *steps = read_metrics(learned)
    assert steps[-1]["eval/reward/mean"] > before["eval/reward/mean"] + 0.25
    assert steps[-1]["agent/tool_calls/mean"] > steps[0]["agent/tool_calls/mean"] + 0.25
    assert max(step["policy/sampler_mismatch_nats/max"] for step in steps) < 1e-4


@pytest.mark.nightly
def test_evaluation_holds_conversations_with_tools(learned: Path, tmp_path: Path) -> None:
    source = ("mode=eval", f"eval.checkpoint={learned}")
    alone = ("agent=single_turn", "agent.tools=[]")
    of_run = read_metrics(learned)[-1]
    (of_model,) = train(tmp_path / "with", *LEARNING, *source)
    (none,) = train(tmp_path / "without", *LEARNING, *source, *alone)
    assert of_model["eval/reward/mean"] == of_run["eval/reward/mean"]
    names = {"eval/agent/turns/mean", "eval/agent/tool_calls/mean", "eval/agent/sequences/mean"}
    assert {name: of_run[name] for name in names} == {name: of_model[name] for name in names}
    assert of_run["eval/agent/tool_calls/mean"] > 0.5
    assert not any(name.startswith("eval/agent/") for name in none)
    assert none["eval/reward/mean"] < 0.1
    for folder in (learned, tmp_path / "with"):
        assert any(turn["role"] == "tool" for turn in turns_of(folder, "eval"))


def _command(program: Path, argument: str) -> str:
    return f"agent.command=[{sys.executable},{program},{argument}]"


def test_players_of_a_game_learn_from_rewards_of_their_own(tmp_path: Path) -> None:
    (page,) = [b for b in blocks_of(ROOT / "docs/how-to/self-play.md") if b.language == "python"]
    (tmp_path / page.title).write_text(page.text)
    command = f"agent.command=[{sys.executable},-S,{tmp_path / page.title}]"
    game = ("agent=proxy", "agent.loop=proxy", command, "algorithm=rae", "reward.function=agent")
    steps = _train(tmp_path / "run", *game)
    for step in steps:
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
        assert step["agent/ended_by_error_fraction"] == 0
        first, second = (step[f"reward/baseline/calculator_{player}"] for player in (0, 1))
        assert first * second < 0  # one's gain is the other's loss
        assert step["reward/mean"] == 0
        assert step["policy/grad_norm"] > 0
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert "rewards are all" not in log
    assert "equal" not in log
    assert steps[0]["reward/baseline/calculator_0"] != steps[1]["reward/baseline/calculator_0"]


def test_programs_hold_their_conversations_over_updates_of_the_weights(tmp_path: Path) -> None:
    asks_twice = _command(AGENTS / "programs.py", "answers")
    ahead = ("serving=own", "trainer.max_staleness=1", "algorithm.rollout_correction=importance")
    steps = _train(
        tmp_path, "agent=proxy", "agent.loop=proxy", asks_twice, *ahead, "trainer.num_steps=3"
    )
    assert max(step["rollout/staleness_steps/max"] for step in steps) == 1
    described = [step for step in steps if "agent/turns/mean" in step]  # programs that ended
    assert [step["agent/turns/mean"] for step in described] == [2] * len(described)
    assert {step["agent/ended_by_error_fraction"] for step in described} == {0}
    assert sum(step["agent/refused_requests"] for step in steps) == 0
    assert max(step["policy/grad_norm"] for step in steps) > 0
    assert any(turn["text"].endswith("u:Sure?<|end|>a:") for turn in turns_of(tmp_path))


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(("lora=default", "serving.on_update=finish"), id="adapters"),
        pytest.param((), id="full", marks=pytest.mark.nightly),
    ],
)
def test_conversations_go_on_over_updates_though_some_break_before_their_first_turn(
    weights: tuple[str, ...], tmp_path: Path
) -> None:
    steps = _train(
        tmp_path,
        *(f"agent.loop={OWN}:SomeBreakAtOnce", "agent.tools=[]", "actor.optimizer.lr=1e-2"),
        *("serving=own", "trainer.max_staleness=2", "algorithm.rollout_correction=importance"),
        *("trainer.num_steps=6", "trainer.num_prompts_per_step=2", *weights),
        *("rollout.max_response_tokens=160", "serving.num_devices_per_node=1"),
        "serving.models={policy: {groups: {main: {num_devices: 1}}}}",
    )
    name = "policy/sampler_mismatch_nats/"  # of tokens of the newest weights, and of others
    fresh, older = ([s.get(name + of, 0.0) for s in steps] for of in ("max", "older_versions"))
    assert max(fresh) < 1e-4 < max(older)
    assert max(step.get("agent/ended_by_error_fraction", 0.0) for step in steps) > 0


def test_an_agent_writes_a_column_of_the_data_into_open_turns(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n}+1", "answer": f"{n + 1}", "metadata": {"hint": f"+{n}"}} for n in (7, 8)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = (
        "data=files",
        "data.use_chat_template=false",
        f"data.train_files=[{tmp_path}/rows.jsonl]",
        "data.max_prompt_tokens=32",
    )
    agent = (f"agent.loop={OWN}:WritesOn", "agent.columns=[metadata]")
    for step in _train(tmp_path / "run", *files, *agent):
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
        assert step["agent/turns/mean"] > 1
    turns = turns_of(tmp_path / "run")
    assert {turn["text"] for turn in turns if turn["role"] == "tool"} == {"+7", "+8"}
    before = [one["text"] for one, other in pairwise(turns) if other["role"] == "tool"]
    assert {text[-1] for text in before} <= {*"01234"}
