from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.rollout import AgentRollout, load_agent, require_usable_agent, tool_schemas
from hybridrl.agents.tool_calls import ToolCall
from hybridrl.agents.trajectory import (
    CallRecord,
    TokenSequence,
    Trajectory,
    Turn,
    TurnRecord,
    call_record,
    decode_turns,
    encode_turns,
    messages_of,
    turns_of,
)
from hybridrl.batch import PromptBatch, RolloutBatch, jagged
from hybridrl.config.agent import AgentConfig
from hybridrl.config.serving import ServedModelConfig
from hybridrl.data.prompts import TokenizedRow, encode_row
from hybridrl.data.rows import Message, Row
from hybridrl.data.source import PromptStep
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import AgentError, EngineError
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.processes.guard import process_name
from hybridrl.rewards.scorer import Scores
from hybridrl.run.samples import SampleTaker
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.workers.build import build_agent_rollout
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.agents.chat_templates import build_tokenizer
from tests.agents.fake_sampler import Broken, FakeSampler
from tests.config.values import config_of
from tests.tiny_models import make_tiny_model

STARTER = build_starter_tokenizer()
OWN = Path(__file__).with_name("own_agents.py")
CONFIG = config_of("agent=tool_calls", "data=calculator", "agent.tool_format=pythonic").agent
SAMPLING = SamplingParams(num_responses_per_prompt=2, max_response_tokens=200, temperature=1.0)
ROWS = [
    Row(prompt="é", answer="42", source="s", origin="o"),
    Row(prompt=(Message("user", "Q"),), answer="7", source="s", origin="o", difficulty=1.5),
]
PROMPTS = PromptBatch(
    token_ids_PL=jagged([torch.tensor([65]), torch.tensor([66, 67])]),
    prompt_index_P=torch.arange(2),
    seed_P=torch.tensor([11, 12]),
    row_PN=jagged([encode_row(row) for row in ROWS]),
    batch_size=[2],
)


def _rollout(config: AgentConfig) -> AgentRollout:
    stops = (STARTER.eos_token_id,)
    return AgentRollout(config, STARTER, stop_token_ids=stops, max_prompt_tokens=8000)


def _run(rollout: AgentRollout, sampler: FakeSampler | None = None) -> list[Sample]:
    sampler = sampler or FakeSampler(STARTER, ["42"] * 20)
    samples = asyncio.run(rollout.program(PROMPTS, SAMPLING)(sampler))
    rollout.close()
    return samples


def test_every_response_is_a_conversation_of_its_own() -> None:
    first = ["[calculator(expression='6*7')]", "[calculator()]", "[calculator(2=3)]", "No."]
    script = [*first, "42", "42", "42"]
    sampler = FakeSampler(STARTER, script)
    rollout = _rollout(CONFIG)
    samples = _run(rollout, sampler)
    texts = [STARTER.decode(sample.token_ids) for sample in samples]
    assert texts[0] == "[calculator(expression='6*7')]<|end|>t:42<|end|>a:42<|end|>"
    assert "t:Error: calculator needs the argument 'expression'" in texts[1]
    assert "t:Error: the call '[calculator(2=3)]' cannot be read" in texts[2]
    assert texts[3] == "No.<|end|>"
    assert len({request.key for request in sampler.requests}) == len(sampler.requests)
    metrics = rollout.take_metrics()
    assert metrics["agent/turns/mean"] == Mean(7, 4)
    assert metrics["agent/tool_calls/mean"] == Mean(3, 4)
    assert metrics["agent/tool_error_fraction"] == Mean(2, 3)
    assert metrics["agent/ended_by_tokens_fraction"] == Mean(0, 4)
    assert rollout.take_metrics() == {}


def test_what_broke_in_many_conversations_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _run(_rollout(CONFIG), FakeSampler(STARTER, ["[calculator()]"] * 4 + ["42"] * 4))
    (told,) = caplog.messages
    assert told.startswith("all 4 calls of tools failed; the first answer: ")
    assert "calculator needs the argument 'expression'" in told
    caplog.clear()
    _run(_rollout(replace(CONFIG, loop=f"{OWN}:BreaksOff")))
    (told,) = caplog.messages  # one answer is even
    away = "ConnectionError: the tool's server is away"
    assert told.startswith(f"2 of 4 conversations broke off: {away} (own_agents.py:")


def test_one_at_a_time_gives_the_same_streams() -> None:
    keys = []
    for num_conversations in (1, 8):
        sampler = FakeSampler(STARTER, ["No."] * 4)
        _run(_rollout(replace(CONFIG, num_conversations=num_conversations)), sampler)
        keys.append([request.key for request in sampler.requests])
    assert keys[0] == keys[1]


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        (f"{OWN}:Wordless", "cannot be loaded: AttributeError: .*appended_roles"),
        (f"{OWN}:Nobody", "cannot be loaded: KeyError: 'Nobody'"),
    ],
)
def test_a_class_that_is_no_agent_is_refused(spelled: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        load_agent(spelled)


def test_the_chat_template_is_checked_before_the_run() -> None:
    qwen3 = build_tokenizer("qwen3")
    stops = (qwen3.eos_token_id,)
    with pytest.raises(AgentError, match=r"set agent\.history=keep"):
        require_usable_agent(CONFIG, qwen3, stop_token_ids=stops)
    require_usable_agent(replace(CONFIG, history="keep"), qwen3, stop_token_ids=stops)
    require_usable_agent(replace(CONFIG, loop="single_turn"), qwen3, stop_token_ids=stops)


def test_only_an_agent_shows_tools_in_prompts() -> None:
    assert [schema["function"]["name"] for schema in tool_schemas(CONFIG)] == ["calculator"]
    assert tool_schemas(replace(CONFIG, loop="single_turn")) == ()


PROGRAM = Path(__file__).with_name("programs.py")


def _run_program(
    *words: str, timeout_s: float = 60.0, max_turns: int = 8, sampler: FakeSampler | None = None
) -> tuple[list[Sample], Metrics]:
    command = (sys.executable, "-S", "-E", str(PROGRAM), *words)
    config = config_of("agent=proxy", "data=calculator", f"agent.command=[{sys.executable}]").agent
    rollout = _rollout(replace(config, command=command, timeout_s=timeout_s, max_turns=max_turns))
    return _run(rollout, sampler), rollout.take_metrics()


@pytest.mark.parametrize("kind", ["answers", "floods"])
def test_the_last_turn_of_a_program_is_the_answer(kind: str) -> None:
    samples, metrics = _run_program(kind)
    assert [STARTER.decode(sample.context) for sample in samples[1:3]] == [
        "u:é 42<|end|>a:",
        "u:[{'role': 'user', 'content': 'Q'}] 7<|end|>a:",
    ]
    assert STARTER.decode(samples[0].token_ids) == "42<|end|>u:Sure?<|end|>a:42<|end|>"
    assert not samples[0].is_truncated
    assert metrics["agent/turns/mean"] == Mean(8, 4)
    assert metrics["agent/refused_requests"] == Sum(0)


FAILED = {"ended_by_error_fraction": Mean(4, 4)}
LATE = {"ended_by_time_fraction": Mean(4, 4)}
REFUSED = {"refused_requests": Sum(4), "turns/mean": Mean(8, 4)}
STOPPED = {"ended_by_turns_fraction": Mean(4, 4), "refused_requests": Sum(4)}
STOPPED |= {"ended_by_error_fraction": Mean(0, 4)}


@pytest.mark.parametrize(
    ("kind", "limits", "counted", "message"),
    [
        ("dies", {}, FAILED, "ended with exit status 1; its last line: no more"),
        ("is_killed", {}, FAILED, "was killed by SIGKILL"),
        ("never_asks", {}, FAILED, "sampled nothing"),
        ("hangs", {"timeout_s": 1.0}, LATE, "ran for too long: waiting"),
        ("asks_for_nonsense", {}, REFUSED, ""),
        ("endless", {"max_turns": 3}, STOPPED, ""),
    ],
)
def test_a_program_that_fails_or_meets_a_limit_is_counted_and_ends_no_run(
    kind: str,
    limits: dict[str, Any],
    counted: Metrics,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        samples, metrics = _run_program(kind, **limits)
    assert message in caplog.text
    assert {name: metrics[f"agent/{name}"] for name in counted} == counted
    assert counted is not FAILED or all(sample.is_failed for sample in samples)


def test_a_program_gets_no_key_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JUDGE_KEY", "secret"), ("OTHER", "seen"), ("FOLDER", str(tmp_path))):
        monkeypatch.setenv(name, value)
    model = make_tiny_model(tmp_path / "model", vocab_size=260)
    STARTER.save_pretrained(model)
    config = config_of(
        *("agent=proxy", "data=calculator"),
        f"agent.command=[{sys.executable}, -S, {PROGRAM}, keeps_its_environment]",
    )
    judge = ServedModelConfig(urls=("http://judge:30000",), key_variable="JUDGE_KEY")
    config = replace(config, serving=replace(config.serving, models={"judge": judge}))
    rollout = build_agent_rollout(config, model)
    assert rollout is not None
    _run(rollout)
    environments = [json.loads(path.read_text()) for path in tmp_path.glob("[0-9]*")]
    assert len(environments) == 4
    for environment in environments:
        assert environment["OTHER"] == "seen"
        assert "JUDGE_KEY" not in environment
        assert "secret" not in environment.values()


def test_no_process_of_a_program_is_left_also_after_an_error_of_the_engine(tmp_path: Path) -> None:
    _run_program("leaves_a_process", str(tmp_path))
    assert len([*tmp_path.iterdir()]) == 4
    with pytest.raises(EngineError, match="the engine failed"):
        _run_program("leaves_a_process", str(tmp_path), sampler=Broken(STARTER, []))
    assert not any(process_name(int(path.name)) for path in tmp_path.iterdir())


TEXT = st.text(st.characters())
CALL = st.builds(CallRecord, TEXT, TEXT, st.booleans())
TURN = st.builds(
    TurnRecord,
    TEXT,
    st.integers(0, 9),
    st.lists(st.builds(Message, TEXT, TEXT), max_size=2).map(tuple),
    st.lists(CALL, max_size=2).map(tuple),
)


@given(turns=st.lists(TURN, max_size=4))
def test_turns_arrive_as_they_were_sent(turns: list[TurnRecord]) -> None:
    assert decode_turns(encode_turns(turns)) == turns


def _held(loop: str, *script: str) -> RolloutBatch:
    samples = _run(_rollout(replace(CONFIG, loop=loop)), FakeSampler(STARTER, list(script)))
    return assemble_rollouts(PROMPTS, samples, policy_version=0)


def test_roles_messages_and_calls_of_a_conversation() -> None:
    call = "[calculator(expression='6*7'), f()]"
    rollouts = _held("tool_calls", call, *["No."] * 3, "42")
    said = messages_of(rollouts, 0, STARTER)
    (first, _), (second, at), _ = turns_of(rollouts, 0)
    assert [message["role"] for message in said] == ["assistant", "tool", "tool", "assistant"]
    assert [message["text"] for message in said][::3] == [call, "42"]
    assert said[1]["text"] == "42"
    assert said[2]["text"].startswith("Error: ")
    assert first.calls[0] == CallRecord("calculator", '{"expression": "6*7"}', is_error=False)
    assert first.calls[1] == CallRecord("f", "{}", is_error=True)
    assert (first.role, second.role) == ("assistant", "tool")
    tokens = rollouts.token_ids_BL.values()[at.start : at.stop].tolist()
    assert STARTER.decode(tokens).startswith("t:42")
    assert messages_of(rollouts, 1, STARTER) == [{"role": "assistant", "text": "No."}]
    users = _held(f"{OWN}:TellsTheAnswer", *["x"] * 8)
    assert messages_of(users, 0, STARTER)[1] == {"role": "user", "text": "42 of é"}


def test_neither_rendered_history_nor_a_failure_is_a_message() -> None:
    sampled = [Turn(torch.tensor([65]), torch.zeros(1)), Turn(torch.tensor([66]), torch.zeros(1))]
    trajectory = Trajectory(
        sequences=(
            TokenSequence(torch.tensor([70, 71]), (sampled[0],)),
            TokenSequence(torch.tensor([72, 73, 74]), (sampled[1],)),
        ),
        ended="error",
        failure="it broke",
        num_tool_calls=0,
        num_tool_errors=0,
        tool_seconds=0.0,
    )
    rollouts = assemble_rollouts(PROMPTS, [trajectory.to_sample()] * 2, policy_version=0)
    turns = [(turn.role, turn.num_tokens) for turn, _ in turns_of(rollouts, 1)]
    assert turns == [("assistant", 1), ("history", 3), ("assistant", 1), ("failure", 0)]
    said = messages_of(rollouts, 1, STARTER)
    assert said == [{"role": "assistant", "text": STARTER.decode([n])} for n in (65, 66)]


def test_a_sample_shows_calls_and_the_rewards_of_turns() -> None:
    rollouts = _held("tool_calls", "[calculator(expression='6*7')]", "4", "4", "4", "42")
    positions = [at for _, at in turns_of(rollouts, 0)]
    rewards_T = torch.zeros(len(rollouts.token_ids_BL.values()))
    rewards_T[positions[0].stop - 1] = 0.25
    rollouts.agent_rewards_BL = torch.nested.nested_tensor_from_jagged(
        rewards_T,
        rollouts.token_ids_BL.offsets(),  # type: ignore[attr-defined]
    )
    rows = tuple(TokenizedRow(row, "p", torch.tensor([1])) for row in ROWS)
    failed_B1 = torch.zeros(len(rollouts), 1, dtype=torch.bool)
    scores = Scores(("r",), torch.ones(1), torch.zeros(len(rollouts), 1), failed_B1)
    taker = SampleTaker(STARTER, num_samples=2, split="train")
    first, second = taker.take(PromptStep(PROMPTS, rows), rollouts, scores)
    assert [(turn.role, turn.reward) for turn in first.turns] == [
        ("assistant", 0.25),
        ("tool", None),
        ("assistant", 0.0),
    ]
    assert asdict(first.turns[0].calls[0])["arguments"] == '{"expression": "6*7"}'
    assert second.turns == ()


def test_arguments_that_json_has_no_form_for_are_shown() -> None:
    assert call_record(ToolCall("f", {"x": {1}}), is_error=True).arguments == "{'x': {1}}"
