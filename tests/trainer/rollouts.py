from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hybridrl.batch import RolloutBatch, jagged
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import Row
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams
from tests.data.tokenized import source_of


def row_of(
    n: int, *, answer: str = "a", text: str | None = None, source: str = "s", tokens: Any = None
) -> TokenizedRow:
    prompt = text or f"p{n}"
    token_ids = torch.tensor(tokens or [n + 1])
    return TokenizedRow(Row(prompt, answer, source, f"f:{n}"), prompt, token_ids)


def source_of_rows(num_rows: int, *, num_prompts: int, shuffle: bool = True) -> PromptSource:
    rows = [row_of(n) for n in range(num_rows)]
    return source_of(rows, num_prompts=num_prompts, seed=3, shuffle=shuffle)


def rollouts_of(
    tokens: Sequence[Tensor], masks: Sequence[Tensor], prompt_index: Any, **columns: Any
) -> RolloutBatch:
    size = len(tokens)
    given: dict[str, Any] = {
        "sampler_logprobs_BL": jagged([torch.zeros(len(row)) for row in tokens]),
        "policy_version_B": torch.zeros(size, dtype=torch.int64),
        "is_truncated_B": torch.zeros(size, dtype=torch.bool),
    }
    return RolloutBatch(
        token_ids_BL=jagged(tokens),
        response_mask_BL=jagged(masks),
        prompt_index_B=torch.as_tensor(prompt_index),
        batch_size=[size],
        **(given | columns),
    )


def scores_of(rewards: Any) -> Scores:
    rewards_B1 = torch.as_tensor(rewards)[:, None]
    return Scores(("one",), torch.ones(1), rewards_B1, torch.zeros_like(rewards_B1).bool())


class ScoredAfterwards:
    """A reward that scores nothing while others are sampled."""

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        return nullcontext(sampling)
