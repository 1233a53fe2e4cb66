"""What the driver reads of conversations: roles, messages and calls, beside the tokens."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from hypothesis import given
from hypothesis import strategies as st

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
from hybridrl.batch import RolloutBatch
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Message
from hybridrl.data.source import PromptStep
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.rewards.scorer import Scores
from hybridrl.run.samples import SampleTaker
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.agents.fake_sampler import FakeSampler
from tests.agents.test_rollout import CONFIG, OWN, PROMPTS, ROWS, _run

STARTER = build_starter_tokenizer()
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
    samples, _ = _run(replace(CONFIG, loop=loop), FakeSampler(STARTER, list(script)))
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


def test_history_that_was_rendered_anew_is_no_message() -> None:
    sampled = [Turn(torch.tensor([65]), torch.zeros(1)), Turn(torch.tensor([66]), torch.zeros(1))]
    trajectory = Trajectory(
        sequences=(
            TokenSequence(torch.tensor([70, 71]), (sampled[0],)),
            TokenSequence(torch.tensor([72, 73, 74]), (sampled[1],)),
        ),
        ended="answer",
        failure="",
        weight_version=0,
        num_tool_calls=0,
        num_tool_errors=0,
        tool_seconds=0.0,
    )
    rollouts = assemble_rollouts(PROMPTS, [trajectory.to_sample()] * 2, policy_version=0)

    turns = [(turn.role, turn.num_tokens) for turn, _ in turns_of(rollouts, 1)]

    assert turns == [("assistant", 1), ("history", 3), ("assistant", 1)]
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
