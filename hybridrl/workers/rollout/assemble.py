"""Responses of any rollout engine become one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridrl.batch import PromptBatch, RolloutBatch, jagged_from, row_lengths
from hybridrl.workers.rollout.protocol import Response


def assemble_rollouts(
    prompts: PromptBatch, responses: Sequence[Response], *, policy_version: int
) -> RolloutBatch:
    """Put prompts and responses together, row by row.

    Args:
        prompts: P prompts.
        responses: P * G responses, the G siblings of a prompt adjacent, in prompt order.
        policy_version: optimizer steps taken by the weights that sampled them.
    """
    num_responses = len(responses) // len(prompts)
    prompt_rows = prompts.token_ids_PL.unbind()
    tokens, masks, logprobs = [], [], []
    for row, response in enumerate(responses):
        prompt = prompt_rows[row // num_responses]
        tokens += [prompt, response.token_ids]
        masks += [torch.zeros(len(prompt), dtype=torch.bool)]
        masks += [torch.ones(len(response.token_ids), dtype=torch.bool)]
        logprobs += [torch.zeros(len(prompt)), response.logprobs]
    prompt_lengths_B = row_lengths(prompts.token_ids_PL).repeat_interleave(num_responses)
    lengths_B = prompt_lengths_B + torch.tensor([len(r.token_ids) for r in responses])
    return RolloutBatch(
        token_ids_BL=jagged_from(torch.cat(tokens), lengths_B),
        response_mask_BL=jagged_from(torch.cat(masks), lengths_B),
        sampler_logprobs_BL=jagged_from(torch.cat(logprobs), lengths_B),
        prompt_index_B=prompts.prompt_index_P.repeat_interleave(num_responses),
        policy_version_B=torch.full((len(responses),), policy_version),
        is_truncated_B=torch.tensor([response.is_truncated for response in responses]),
        batch_size=[len(responses)],
    )
