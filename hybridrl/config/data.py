"""The ``data`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hybridrl.config.limits import Tokens, Within

Digits = Annotated[
    int, Within(at_least=1, at_most=640, why="Python may refuse to write longer ones")
]
"""Digits of a number. 640 is the lowest limit that ``PYTHONINTMAXSTRDIGITS`` can set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of prompts. Mirrors hydra_configs/data/*.yaml key by key."""

    task: Literal["sort_digits"] | None
    """A built-in task that makes its own rows. Null reads ``data.train_files``."""

    train_files: tuple[str, ...]
    """jsonl or parquet files with columns prompt, answer and optionally source."""

    eval_files: tuple[str, ...]
    """Files for evaluation, same columns. Empty: no evaluation on files."""

    num_task_rows: Annotated[int, Within(at_least=1, at_most=10**7, why="they are held in memory")]
    """Training rows that a built-in task makes; evaluation rows are added to them."""

    min_digits: Digits
    """sort_digits: shortest number, in digits."""

    max_digits: Digits
    """sort_digits: longest number, in digits."""

    prompt_key: str
    """Column of the prompt: text, or a list of chat messages with role and content."""

    answer_key: str
    """Column of the reference answer for the reward function."""

    source_key: str
    """Column of the data source's name; may be missing."""

    use_chat_template: bool
    """Wrap prompts with the tokenizer's chat template. A text prompt becomes one user message."""

    max_prompt_tokens: Tokens
    """Longest prompt, in tokens."""

    overlong_prompts: Literal["error", "drop", "keep_end"]
    """Longer prompts: stop the run, leave them out (counted), or keep their last tokens."""

    shuffle: bool
    """New order of rows each epoch, from ``seed``."""
