from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.agents.conversation import hold
from hybridrl.agents.environments import Environments, PlaysEnvironment, load_environment
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.trajectory import Trajectory
from hybridrl.data.rows import Row
from hybridrl.errors import AgentError
from tests.agents.chat_templates import TOKENIZERS
from tests.agents.fake_sampler import PROMPT, ROW, FakeSampler, conversation_setting

FILE = Path(__file__).with_name("environments_file.py")
TOKENIZER = TOKENIZERS["qwen2.5"]
LIMITS = ToolLimits(timeout_s=20.0, max_chars=60)
NUMBER = random.Random(3).randint(1, 999)  # that GuessNumber thinks of with the seed below


@contextmanager
def playing(name: str, limits: ToolLimits = LIMITS) -> Iterator[Environments]:
    spelled = name if name == "Calculator" else f"{FILE}:{name}"
    environments = Environments(load_environment(spelled), limits=limits)
    try:
        yield environments
    finally:
        environments.close()


def play(
    environments: Environments, turns: Sequence[str], *, row: Row = ROW, num_turns: int = 6
) -> Trajectory:
    (trajectory,) = play_all(environments, [turns], row=row, num_turns=num_turns)
    return trajectory


def play_all(
    environments: Environments,
    scripts: Sequence[Sequence[str]],
    *,
    row: Row = ROW,
    num_turns: int = 3,
) -> list[Trajectory]:
    async def play_one(script: Sequence[str], index: int) -> Trajectory:
        sampler = FakeSampler(TOKENIZER, list(script))
        setting = conversation_setting(sampler, max_new_tokens=1000, max_turns=num_turns)
        prompt = replace(PROMPT, row=row, seed=2**40 + 3, response_index=index, number=index)
        return await hold(PlaysEnvironment(environments), prompt, setting)

    async def play_each() -> list[Trajectory]:
        return await asyncio.gather(*(play_one(script, g) for g, script in enumerate(scripts)))

    return asyncio.run(play_each())


def texts_of(trajectory: Trajectory) -> list[str]:
    texts = [TOKENIZER.decode(turn.token_ids) for turn in trajectory.turns]
    return [TOKENIZER.decode(trajectory.sequences[0].context), *texts]


def rewards_of(trajectory: Trajectory) -> list[float]:
    """The reward of each sampled turn; it comes with the last token."""
    sampled = [turn for turn in trajectory.turns if turn.logprobs is not None]
    rewards = [torch.zeros(1) if t.rewards is None else t.rewards for t in sampled]
    assert all(not values[:-1].any() for values in rewards)
    return [float(values[-1]) for values in rewards]


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["GuessNumber", "AsyncGuess"])
def test_an_environment_answers_and_rewards_each_turn(name: str) -> None:
    with playing(name) as environments:
        trajectory = play(environments, ["1000", "?", str(NUMBER)])
        siblings = play_all(environments, [[str(NUMBER)]] * 2)
    assert [sibling.ended for sibling in siblings] == ["answer"] * 2  # the same environment
    texts = texts_of(trajectory)
    assert texts[0].endswith(asked("Q\n\nI think of a number. 42"))
    assert texts[1:] == [
        "1000<|im_end|>",
        f"\n{asked('lower')}",
        "?<|im_end|>",
        f"\n{asked('That is no number')}",
        f"{NUMBER}<|im_end|>",
    ]
    assert rewards_of(trajectory) == [0.25, -0.5, 0.25]
    assert trajectory.ended == "answer"
    sample = trajectory.to_sample()
    assert sample.rewards is not None
    assert float(sample.rewards.sum()) == 0.0


def test_environments_of_gymnasium_fit() -> None:
    for name in ("Gym", "make_gym"):
        with playing(name) as environments:
            row = replace(ROW, own='{"level": 3}')
            trajectory = play(environments, ["left", "right", "up"], row=row)
        texts = texts_of(trajectory)
        assert texts[0].endswith(asked('Q\n\n[1, "42", {"level": 3}]'))
        assert texts[2] == f"\n{asked('1')}"
        assert rewards_of(trajectory) == [1.5, 1.5]
        assert trajectory.ended == "turns"
        assert trajectory.to_sample().is_truncated


def test_messages_take_the_place_of_the_prompt() -> None:
    with playing("Chat") as environments:
        trajectory = play(environments, ["a", "end"])
    texts = texts_of(trajectory)
    assert texts[0] == f"<|im_start|>system\nS< |im_end|><|im_end|>\n{asked('U')}"
    assert "<tool_response>\nT\n</tool_response>" in texts[2]
    assert rewards_of(trajectory) == [1.0, 1.0]


def test_a_limit_ends_the_conversation_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDRL_TEST_CLOSED", str(tmp_path))
    with playing("GuessNumber") as environments:
        trajectory = play(environments, ["?"] * 9, num_turns=3)
        num_closed = len(list(tmp_path.iterdir()))
    assert trajectory.ended == "turns"
    assert rewards_of(trajectory) == [-0.5] * 3
    assert num_closed == 1


FAULTS = {
    "raise": "raised ValueError: no move",
    "die": "ended its process",
    "unencodable": "cannot be written as JSON",
    "nan": "must be finite",
    "pair": r"must be \(observation, reward, done\)",
    "role": "step returned a message of role 'system'",
    "exit": "raised SystemExit",
}


def test_a_fault_of_a_process_costs_its_conversation() -> None:
    scripts = [["x", fault] for fault in FAULTS] + [["flood", "print", "fork"]]
    with playing("Bad") as environments:
        *failed, fine = play_all(environments, scripts)
        again = play(environments, ["x"] * 9, num_turns=3)
    for trajectory in failed:
        assert trajectory.ended == "error"
        assert rewards_of(trajectory) == [1.0, 0.0]
    for trajectory, message in zip(failed, FAULTS.values(), strict=True):
        assert re.search(message, trajectory.failure)
    assert (fine.ended, again.ended) == ("turns", "turns")
    assert "characters left out" in texts_of(fine)[2]


@pytest.mark.parametrize("name", ["Bad", "AsyncBad"])
def test_one_that_cannot_close_has_been_played_all_the_same(name: str) -> None:
    with playing(name) as environments:
        trajectory = play(environments, ["x", "end"])
    assert trajectory.ended == "answer"
    assert rewards_of(trajectory) == [1.0, 1.0]


def test_one_that_forks_in_a_turn_answers_once() -> None:
    with playing("Forks") as environments:
        trajectory = play(environments, ["x"] * 9, num_turns=4)
    assert rewards_of(trajectory) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(("answer", "turns"), [("hang", ["x"]), ("raise", ["x"]), ("", ["hang"])])
def test_one_that_hangs_or_cannot_begin_ends(answer: str, turns: list[str]) -> None:
    with playing("Bad", replace(LIMITS, timeout_s=0.5)) as environments:
        trajectory = play(environments, turns, row=replace(ROW, answer=answer))
        other = play(environments, ["hang"])
    assert trajectory.ended == other.ended == "error"
    assert rewards_of(trajectory) == [0.0]


@pytest.mark.parametrize("fault", ["raise", "unencodable", "nan", "pair", "hang", "exit"])
def test_a_fault_of_a_coroutine_costs_its_conversation(fault: str) -> None:
    with playing("AsyncBad", replace(LIMITS, timeout_s=0.5)) as environments:
        trajectory = play(environments, ["x", fault])
    assert trajectory.ended == "error"
    assert rewards_of(trajectory) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WithoutStep", "has no attribute 'step'"),
        ("WithoutSeed", "its reset takes level; write reset"),
        ("Mixed", "both with `async def`, or none"),
        ("Nobody", "KeyError: 'Nobody'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name: str, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        load_environment(f"{FILE}:{name}")


def test_the_built_in_calculator_rewards_call_and_answer() -> None:
    call = "[calculator(expression='6*7')]"
    with playing("Calculator") as environments:
        trajectory = play(environments, [call, call, "[calculator(expression='1/0')]", "42"])
    assert "\n42\n" in texts_of(trajectory)[2]
    assert "Error: " in texts_of(trajectory)[6]
    assert rewards_of(trajectory) == [0.5, 0.0, 0.0, 1.0]


def test_one_that_a_function_makes_to_be_looked_at_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDRL_TEST_CLOSED", str(tmp_path))
    assert load_environment(f"{FILE}:make_async_guess").is_async
    assert len(list(tmp_path.iterdir())) == 1


def test_processes_of_environments_need_no_torch() -> None:
    code = "import sys, hybridrl.agents.observations; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
