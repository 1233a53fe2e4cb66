"""The functions of a user's own that the README shows train a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of, commands_of
from tests.end_to_end.runs import train

pytestmark = pytest.mark.usefixtures("ray_cluster")
README = ROOT / "README.md"
FILE = "mine.py"


def test_a_run_takes_the_functions_of_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks_of(README) if block.title == FILE]
    Path(FILE).write_text(block.text)
    (command,) = [words for words in commands_of(README) if FILE in " ".join(words)]
    shown = [word for word in command if "=" in word]
    named = {name for word in shown for name in word.split(f"{FILE}:")[1:]}
    assert len(named) == block.text.count("\ndef ") + block.text.startswith("def ")
    lines = train(Path("run"), *shown, "trainer.num_steps=2", "data.max_prompt_tokens=16")
    assert lines[-1]["step"] == 2
