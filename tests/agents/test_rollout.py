"""Conversations of a rollout phase: order, random streams, metrics, and agents of a user."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.agents.rollout import AgentRollout, load_agent, require_usable_agent, tool_schemas
from hybridrl.batch import PromptBatch, jagged
from hybridrl.config.agent import AgentConfig
from hybridrl.data.prompts import encode_row
from hybridrl.data.rows import Message, Row
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import AgentError
from hybridrl.metrics import Mean
from hybridrl.sampler import Sample, SamplingParams
from tests.agents.chat_templates import build_tokenizer
from tests.agents.fake_sampler import FakeSampler
from tests.config.values import config_of

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


def _run(config: AgentConfig, sampler: FakeSampler) -> tuple[list[Sample], AgentRollout]:
    rollout = AgentRollout(config, STARTER, stop_token_ids=(STARTER.eos_token_id,))
    program = rollout.program(PROMPTS, SAMPLING)
    samples = asyncio.run(program(sampler))
    rollout.close()
    return samples, rollout


def test_every_response_is_a_conversation_of_its_own() -> None:
    script = ["[calculator(expression='6*7')]", "[calculator()]", "No.", "No.", "42", "42"]
    sampler = FakeSampler(STARTER, script)

    samples, rollout = _run(CONFIG, sampler)

    texts = [STARTER.decode(sample.token_ids) for sample in samples]
    assert texts[0] == "[calculator(expression='6*7')]<|end|>t:42<|end|>a:42<|end|>"
    assert "t:Error: calculator needs the argument 'expression'" in texts[1]
    assert texts[2:] == ["No.<|end|>"] * 2
    assert len({request.key for request in sampler.requests}) == len(sampler.requests)
    metrics = rollout.take_metrics()
    assert metrics["agent/turns/mean"] == Mean(6, 4)
    assert metrics["agent/tool_calls/mean"] == Mean(2, 4)
    assert metrics["agent/tool_error_fraction"] == Mean(1, 2)
    assert metrics["agent/ended_by_tokens_fraction"] == Mean(0, 4)
    assert rollout.take_metrics() == {}


def test_one_at_a_time_gives_the_same_streams() -> None:
    keys = []
    for num_conversations in (1, 8):
        sampler = FakeSampler(STARTER, ["No."] * 4)
        _run(replace(CONFIG, num_conversations=num_conversations), sampler)
        keys.append([request.key for request in sampler.requests])

    assert keys[0] == keys[1]


def test_an_agent_of_a_user_holds_conversations() -> None:
    sampler = FakeSampler(STARTER, ["x"] * 12)

    samples, rollout = _run(replace(CONFIG, loop=f"{OWN}:AsksTwice"), sampler)

    assert STARTER.decode(samples[3].token_ids) == (
        "x<|end|>t:7<|end|>a:x<|end|>t:8<|end|>a:x<|end|>"
    )
    assert rollout.take_metrics()["agent/turns/mean"] == Mean(12, 4)


def test_an_agent_reads_the_row_of_its_prompt() -> None:
    sampler = FakeSampler(STARTER, ["x"] * 8)

    samples, _ = _run(replace(CONFIG, loop=f"{OWN}:TellsTheAnswer"), sampler)

    texts = [STARTER.decode(sample.token_ids) for sample in samples]
    assert (
        texts
        == ["x<|end|>u:42 of é<|end|>a:x<|end|>"] * 2
        + ["x<|end|>u:7 of (Message(role='user', content='Q'),)<|end|>a:x<|end|>"] * 2
    )


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        (f"{OWN}:Wordless", "cannot be loaded: AttributeError: .*appended_roles"),
        (f"{OWN}:Nobody", "cannot be loaded: KeyError: 'Nobody'"),
        (f"{OWN}:Message", "cannot be loaded: AttributeError"),
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
