"""The ``data`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hybridrl.config.limits import Name, Processes, Tokens

MOST_SOURCES = 1000
"""Rows of a mix are drawn in blocks of this many, in which each source has its share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One source of ``data.sources``: a key that is left out, or null, is that of ``data``."""

    files: tuple[str, ...]
    """Files of the source, as in ``data.train_files``."""

    weight: Annotated[float, Field(gt=0.0, le=1e6, examples=[1.0])] | None = None
    """Weight in the mix: share of drawn rows times the sum of all weights. Null: 1."""

    prompt_key: str | None = None
    """Column of the prompt."""

    answer_key: str | None = None
    """Column of the reference answer, or of the chosen one."""

    rejected_key: str | None = None
    """Column of the rejected answer."""

    source_key: str | None = None
    """Column of the data source's name; a row without one gets the name of the source."""

    difficulty_key: str | None = None
    """Column of the difficulty."""


CHAT_TASKS = ("calculator", "read_numbers")
"""Built-in tasks whose rows are chat messages: the made model has a chat template for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Source of prompts. Mirrors hydra_configs/data/*.yaml key by key."""

    task: Literal["sort_digits", "calculator", "read_numbers"] | None
    """A built-in task that makes its own rows: numbers to sort, arithmetic to be computed with the
    tool ``calculator``, or images of numbers to read. Numbers to sort have 2 to 20 digits, as far
    as they fit into prompt and response. Null reads ``data.train_files``."""

    train_files: tuple[str, ...]
    """Files with columns prompt, answer and optionally source: jsonl, json, csv, parquet, or a
    folder that ``save_to_disk`` of Hugging Face datasets wrote."""

    eval_files: tuple[str, ...]
    """Files for evaluation, same columns. Empty: no evaluation on files."""

    sources: Mapping[Name, SourceConfig]
    """A weighted mix instead of ``data.train_files``: ``data.sources.NAME.files=[FILE]``. Keys of
    a source: files, weight, prompt_key, answer_key, source_key, difficulty_key."""

    num_task_rows: Annotated[int, Field(ge=1, le=10**7)]
    """Training rows that a built-in task makes; evaluation rows are added to them."""

    prompt_key: str | None
    """Column of the prompt: text, or a list of chat messages with role and content. Null: the
    messages that both chats of a preference pair begin with."""

    answer_key: str | None
    """Column of the reference answer for the reward function. Null: the answer is the last message
    of the prompt, which is the assistant's. With ``data.rejected_key`` the chosen answer."""

    rejected_key: str | None
    """Column of the rejected answer: rows are preference pairs, whose chosen answer is that of
    ``data.answer_key``. Answers are text, or chats that end with the answer. Null: no pairs."""

    images_key: str | None
    """Column of a row's images, which a row need not have: a list of paths, or of bytes. Each
    stands for an ``<image>`` in the prompt. Null reads no such column."""

    max_image_pixels: Annotated[int, Field(ge=1, le=50_000_000)] | None  # larger are refused
    """Larger images are made smaller; null: the limit of the model's folder."""

    source_key: str
    """Column of the data source's name; may be missing."""

    difficulty_key: str | None
    """Column of a row's difficulty, a number, for ``data.curriculum``."""

    curriculum: Literal["none", "easy_first", "hard_first", "solve_rate"]
    """Order within an epoch by difficulty. Rows of equal difficulty are shuffled, if ``shuffle``.
    In a mix each source has its own order. ``solve_rate`` draws without epochs, those rows most
    that were solved about half of the time so far; rewards are 0 to 1."""

    use_chat_template: bool
    """Wrap prompts with the tokenizer's chat template. A text prompt becomes one user message."""

    max_prompt_tokens: Tokens
    """Longest prompt, in tokens."""

    overlong_prompts: Literal["error", "drop", "keep_end"]
    """Longer prompts: stop the run, leave them out (counted), or keep their last tokens."""

    shuffle: bool
    """New order of rows each epoch, from ``seed``."""

    num_processes: Processes | None
    """Processes that read and tokenize a set of many rows. Null: as many as the driver may use
    cores, at most 16. The rows are the same with any number."""
