"""Environments of other projects, in interpreters that have their packages: make test-standards."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from hybridrl.agents.proxy_server import MODEL
from hybridrl.agents.tool_calls import load_format
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.env import ROOT
from hybridrl.run.record import RunFolder
from hybridrl.run.starter import find_model
from tests.agents.fake_sampler import FakeSampler, require_as_sampled
from tests.agents.test_proxy import served
from tests.docs.blocks import blocks_of
from tests.end_to_end.runs import samples_of, train
from tests.end_to_end.small import small_config
from tests.end_to_end.test_conversations import CALCULATOR, LEARNING, Silent

pytestmark = pytest.mark.usefixtures("ray_cluster")

TASKSETS = Path(__file__).parent
PAGE = ROOT / "docs" / "how-to" / "environments.md"
STARTER = (*CALCULATOR, "model.starter.num_warmup_steps=60", "rollout.temperature=0.5")


def _interpreter(variable: str) -> str:
    path = os.environ.get(variable)
    if path is None:
        pytest.skip("make test-standards gives an interpreter with verifiers")
    return path


def _program_and_rows(folder: Path, interpreter: str, words: list[str]) -> tuple[list[str], Path]:
    """The program of the page that plays an environment, and the file of its rows."""
    for block in blocks_of(PAGE):
        if block.title.startswith("play_"):
            (folder / block.title).write_text(block.text)
    for file in TASKSETS.glob("verifiers_*.py"):
        shutil.copy(file, folder)
    program, *arguments = words
    command = [interpreter, str(folder / program)]
    made = subprocess.run([*command, "rows", *arguments], check=True, stdout=subprocess.PIPE)
    rows = folder / "train.jsonl"
    rows.write_bytes(made.stdout)
    return command, rows


@pytest.mark.timeout(900)  # each conversation imports verifiers
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("VERIFIERS_PYTHON", ["play_verifiers.py", "verifiers_sums", "verifiers_sums"]),
        ("OLD_VERIFIERS_PYTHON", ["play_old_verifiers.py", "verifiers_tools"]),
    ],
    ids=["0.4", "0.1"],
)
def test_environments_of_verifiers_are_trained(
    variable: str, words: list[str], tmp_path: Path
) -> None:
    interpreter = _interpreter(variable)
    command, rows = _program_and_rows(tmp_path, interpreter, words)
    model = find_model(small_config(tmp_path / "none", *LEARNING), cast(RunFolder, Silent()))
    lines = train(
        tmp_path / "run",
        *STARTER,
        *("data=files", f"data.train_files=[{rows}]", "model.starter=null", f"model.path={model}"),
        f"agent.command={json.dumps([*command, 'play', *words[1:]])}",
        *("agent=proxy", "agent.tool_format=pythonic", "agent.timeout_s=400"),
        *("reward.function=agent", "trainer.num_steps=2", "eval.every_num_steps=0"),
        *("rollout.max_response_tokens=96", "data.max_prompt_tokens=32"),
        *("trainer.num_prompts_per_step=2", "rollout.num_responses_per_prompt=2"),
    )
    steps = [line for line in lines if "loss/policy" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["agent/ended_by_error_fraction"] == 0
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
        assert step["agent/sequences/mean"] == 1  # the tokens of each chat go on
    assert max(step["agent/turns/mean"] for step in steps) > 1
    assert max(step["policy/grad_norm"] for step in steps) > 0
    complete = [s for s in samples_of(tmp_path / "run", "train") if not s["is_truncated"]]
    assert complete
    for sample in complete:
        assert sample["reward"] == pytest.approx(_reward_of(sample), abs=1e-6)


def _reward_of(sample: Mapping[str, Any]) -> float:
    """What the rubrics of both environments say, of the turns that were trained."""
    turns = sample.get("turns", [{"role": "assistant", "text": sample["response"]}])
    answered_by = [*(turn["role"] for turn in turns[1:]), "nobody"]
    said = [
        turn["text"].removesuffix("<|end|>").strip()
        for turn, other in zip(turns, answered_by, strict=True)
        if turn["role"] == "assistant" and other != "tool"  # a call has no text
    ]
    digits = [letter in "0123456789" for letter in "".join(said)]
    is_right = said[-1] == json.loads(sample["answer"])["answer"]
    return is_right + 0.25 * sum(digits) / max(len(digits), 1)


@pytest.mark.timeout(900)
async def test_the_rubric_of_an_old_environment_judges_an_empty_turn(tmp_path: Path) -> None:
    """verifiers 0.1 by itself takes such a turn for a fault of the server."""
    command, rows = _program_and_rows(
        tmp_path, _interpreter("OLD_VERIFIERS_PYTHON"), ["play_old_verifiers.py", "verifiers_tools"]
    )
    row = json.loads(rows.read_text().splitlines()[0])
    texts = ["[calculator(expression='2+7*4')]", "30 ", ""]
    for answers, reward in ((texts[:2], 1.25), (texts[::2], 0.0)):
        sampler = FakeSampler(build_starter_tokenizer(), answers)
        async with served(sampler, tool_format=load_format("pythonic")) as client:
            variables = {"OPENAI_BASE_URL": client.server.address, "OPENAI_API_KEY": client.key}
            program = await asyncio.create_subprocess_exec(
                *(*command, "play", "verifiers_tools"),
                stdin=subprocess.PIPE,
                env={**os.environ, **variables, "OPENAI_MODEL": MODEL},
            )
            await program.communicate(json.dumps(row).encode())
        assert program.returncode == 0
        trajectory = client.conversation.to_trajectory()
        require_as_sampled(trajectory, sampler)
        last = trajectory.turns[-1]
        assert last.rewards is not None
        assert last.rewards.sum() == pytest.approx(reward)
