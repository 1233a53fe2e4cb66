"""The beginning of a conversation, and the setting that all conversations of a rank share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.templates import History, TurnTemplate
from hybridrl.agents.tool_calls import Calls
from hybridrl.agents.tools import Toolbox
from hybridrl.data.rows import Row
from hybridrl.sampler import RequestParams, Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The beginning of a conversation."""

    row: Row
    """With the reference answer, for agents that play an environment."""

    token_ids: Tensor
    """int64 [n], n >= 1, of the rendered prompt."""

    seed: int
    """Of the prompt (``PromptBatch.seed_P``)."""

    response_index: int
    """Index of the conversation among those that start with the same prompt, from 0."""

    number: int
    """Of the conversation in its call, from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The setting that all conversations of a rank share."""

    sampler: Sampler
    params: RequestParams
    """``max_new_tokens`` limits all tokens behind the prompt, tool results among them."""

    tokenizer: PreTrainedTokenizerBase
    template: TurnTemplate
    history: History = "strict"
    toolbox: Toolbox
    parse: Callable[[str], Calls]
    """Reads calls in the format of ``agent.tool_format``."""

    max_turns: int
    """Turns of the assistant."""

    timeout_s: float
    """Seconds from the first request to the end."""
