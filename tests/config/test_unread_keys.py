from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.unread_keys import find_unread_keys
from tests.command_line import call_main


@pytest.mark.parametrize(
    ("mode", "typed", "fix"),
    [
        ("sft", "trainer.num_steps=3", "set sft.num_steps=3"),
        ("sft", "dpo.batch_size=8", "set sft.batch_size=8"),
        ("dpo", "trainer.num_prompts_per_step=8", "set dpo.batch_size=8"),
        ("dpo", "sft.num_steps=3", "set dpo.num_steps=3"),
        ("train", "sft.num_steps=3", "set trainer.num_steps=3"),
        ("train", "+dpo.beta=1", "leave it out"),
    ],
)
def test_a_key_of_another_mode_names_that_of_this_one(mode: str, typed: str, fix: str) -> None:
    (error,) = find_unread_keys(mode, ["python", "seed=1", typed])
    assert f"mode={mode} does not read it" in str(error)
    assert f"Fix: {fix}." in str(error)


@pytest.mark.parametrize(
    ("mode", "typed"),
    [
        ("sft", "sft.num_steps=3"),
        ("train", "trainer.num_steps=3"),
        ("sft", "trainer.num_epochs=2"),
        ("check", "sft.num_steps=3"),
        ("doctor", "sft.turns=all"),
    ],
)
def test_a_key_that_the_mode_reads_is_accepted(mode: str, typed: str) -> None:
    assert not list(find_unread_keys(mode, [typed]))


def test_the_steps_of_another_mode_are_refused_when_typed(tmp_path: Path) -> None:
    answer = call_main("mode=sft", "trainer.num_steps=3", folder=tmp_path)
    assert answer.returncode == 2
    assert "trainer.num_steps='3': mode=sft does not read it" in answer.stderr
