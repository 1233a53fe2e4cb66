"""Runs whose responses come from agent programs: ordinary clients of OpenAI."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.child import to_yaml
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config
from hybridrl.main import compose
from hybridrl.run.launch import run
from tests.end_to_end.small import read_metrics, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

CALCULATOR = Path(__file__).with_name("calculator_program.py")
ASKS_TWICE = Path(__file__).parents[1] / "agents" / "programs.py"
REWARD = Path(__file__).with_name("varied_reward.py")


def _command(program: Path, argument: str) -> str:
    return f"agent.command=[{sys.executable},{program},{argument}]"


def _train(config: ExperimentConfig) -> list[dict[str, float]]:
    run(config, resolved_yaml=to_yaml(config))
    steps = read_metrics(Path(config.trainer.run_dir))
    return [step for step in steps if "loss/policy" in step]


def test_what_a_program_sampled_is_trained(tmp_path: Path) -> None:
    steps = _train(
        small_config(
            tmp_path,
            *("agent=proxy", "data=calculator", _command(ASKS_TWICE, "answers")),
            *("rollout.max_response_tokens=64", "model.starter.num_warmup_steps=60"),
            *("data.max_prompt_tokens=32", f"reward.function={REWARD}:varied"),
            *("trainer.num_steps=2", "eval.every_num_steps=0"),
        )
    )

    for step in steps:
        assert step["policy/sampler_mismatch_nats/mean"] < 1e-5
        assert step["agent/turns/mean"] == 2
        assert step["agent/ended_by_error_fraction"] == 0
    assert max(step["policy/grad_norm"] for step in steps) > 0
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [turn for line in lines for turn in json.loads(line).get("turns", ())]
    assert any(turn["text"].endswith("u:Sure?<|end|>a:") for turn in turns)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # each step starts 128 programs
@pytest.mark.parametrize(("client", "num_steps"), [("http", 25), ("openai", 2)])
def test_the_calculator_is_learned_through_a_client(
    client: str, num_steps: int, tmp_path: Path
) -> None:
    pytest.importorskip("openai", reason="comes with SGLang")
    overrides = ("recipes=cpu/calculator", "agent.loop=proxy", "agent.tools=[]")
    of_run = (f"trainer.num_steps={num_steps}", "eval.every_num_steps=0", "tracking.live=off")
    folder = f"trainer.run_dir={tmp_path}"
    command = _command(CALCULATOR, client)

    steps = _train(load_config(compose([*overrides, command, *of_run, folder])))

    rewards = [step["reward/mean"] for step in steps]
    assert steps[0]["agent/turns/mean"] > 1.1
    assert num_steps < 10 or sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert max(step["policy/sampler_mismatch_nats/mean"] for step in steps) < 1e-5
