"""Agent programs: whatever they do, their conversation ends, and no process is left."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from hybridrl.agents.rollout import AgentRollout
from hybridrl.config.serving import ServedModelConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import EngineError
from hybridrl.images import Images
from hybridrl.metrics import Mean, Metrics, Sum
from hybridrl.processes.guard import process_name
from hybridrl.sampler import RequestParams, Sample
from hybridrl.workers.build import build_agent_rollout
from tests.agents.fake_sampler import FakeSampler
from tests.agents.test_rollout import PROMPTS, SAMPLING
from tests.config.values import config_of
from tests.tiny_models import make_tiny_model

STARTER = build_starter_tokenizer()
PROGRAM = Path(__file__).with_name("programs.py")


def _run(
    *words: str, timeout_s: float = 60.0, max_turns: int = 8, sampler: FakeSampler | None = None
) -> tuple[list[Sample], Metrics]:
    """Hold two conversations with each of two prompts."""
    command = (sys.executable, "-S", "-E", str(PROGRAM), *words)
    config = config_of("agent=proxy", "data=calculator", f"agent.command=[{sys.executable}]").agent
    config = replace(config, command=command, timeout_s=timeout_s, max_turns=max_turns)
    rollout = AgentRollout(config, STARTER, stop_token_ids=(STARTER.eos_token_id,))
    return _sample(rollout, sampler)


def _sample(
    rollout: AgentRollout, sampler: FakeSampler | None = None
) -> tuple[list[Sample], Metrics]:
    sampler = sampler or FakeSampler(STARTER, ["42"] * 20)
    samples = asyncio.run(rollout.program(PROMPTS, SAMPLING)(sampler))
    rollout.close()
    return samples, rollout.take_metrics()


@pytest.mark.parametrize("kind", ["answers", "floods"])
def test_the_last_turn_of_a_program_is_the_answer(kind: str) -> None:
    samples, metrics = _run(kind)

    assert [STARTER.decode(sample.context) for sample in samples[1:3]] == [
        "u:é 42<|end|>a:",
        "u:[{'role': 'user', 'content': 'Q'}] 7<|end|>a:",
    ]
    assert STARTER.decode(samples[0].token_ids) == "42<|end|>u:Sure?<|end|>a:42<|end|>"
    assert not samples[0].is_truncated
    assert metrics["agent/turns/mean"] == Mean(8, 4)
    assert metrics["agent/refused_requests"] == Sum(0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dies", "ended with exit status 1; its last line: no more"),
        ("is_killed", "was killed by SIGKILL"),
        ("never_asks", "sampled nothing"),
    ],
)
def test_a_program_without_an_answer_is_counted(
    kind: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        samples, metrics = _run(kind)

    assert message in caplog.text
    assert metrics["agent/ended_by_error_fraction"] == Mean(4, 4)
    assert all(sample.is_failed for sample in samples)


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

    _sample(rollout)

    environments = [json.loads(path.read_text()) for path in tmp_path.glob("[0-9]*")]
    assert len(environments) == 4
    for environment in environments:
        assert environment["OTHER"] == "seen"
        assert "JUDGE_KEY" not in environment
        assert "secret" not in environment.values()


def test_no_process_of_a_program_is_left(tmp_path: Path) -> None:
    _run("leaves_a_process", str(tmp_path))

    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4
    assert not any(map(process_name, pids))


def test_an_error_of_the_engine_ends_the_programs(tmp_path: Path) -> None:
    class Broken(FakeSampler):
        async def sample(
            self,
            token_ids: Sequence[int] | Tensor,
            params: RequestParams,
            *,
            key: int,
            images: Images = (),
        ) -> Sample:
            raise EngineError("the engine failed")

    with pytest.raises(EngineError, match="the engine failed"):
        _run("leaves_a_process", str(tmp_path), sampler=Broken(STARTER, []))

    assert not any(process_name(int(path.name)) for path in tmp_path.iterdir())


def test_a_program_that_hangs_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, metrics = _run("hangs", timeout_s=1.0)

    assert metrics["agent/ended_by_time_fraction"] == Mean(4, 4)
    assert "ran for too long: waiting" in caplog.text


def test_a_program_that_asks_for_nonsense_does_not_end_the_run() -> None:
    _, metrics = _run("asks_for_nonsense")

    assert metrics["agent/refused_requests"] == Sum(4)
    assert metrics["agent/turns/mean"] == Mean(8, 4)


def test_an_endless_program_meets_a_limit() -> None:
    _, metrics = _run("endless", max_turns=3)

    assert metrics["agent/ended_by_turns_fraction"] == Mean(4, 4)
    assert metrics["agent/ended_by_error_fraction"] == Mean(0, 4)
    assert metrics["agent/refused_requests"] == Sum(4)
