from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from hybridrl.config.reward import RewardConfig
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer


def inputs(*responses: str, **columns: Any) -> RewardInputs:
    """Rows with these responses; columns that are not given are the same in all of them."""
    num_rows = len(responses)
    common: dict[str, Any] = {
        "answers": ["42"] * num_rows,
        "prompts": [str(row) for row in range(num_rows)],
        "sources": ["s"] * num_rows,
        "lengths": [1] * num_rows,
    }
    return RewardInputs(responses=list(responses), **(common | columns))


def write_function(folder: Path, head: str, body: str) -> str:
    """Write a function ``reward`` to a file; return what ``reward.function`` takes.

    The first line of its body is line 5. ``NOTES`` begins the paths of files that it may write.
    """
    path = folder / "mine.py"
    path.write_text(
        "import asyncio, math, os, signal, struct, subprocess, sys, time\n"
        f"NOTES = {str(folder / 'notes')!r}\n\n{head}\n"
        + textwrap.indent(textwrap.dedent(body).lstrip("\n"), "    ")
    )
    return f"{path}:reward"


def scorer_of(function: str | None, **others: Any) -> RewardScorer:
    common: dict[str, Any] = {"args": {}, "functions": {}, "num_processes": 2}
    common |= {"timeout_s": 20.0, "on_error": "zero"}
    return RewardScorer(RewardConfig(function=function, **(common | others)))
