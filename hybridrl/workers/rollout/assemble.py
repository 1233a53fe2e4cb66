"""Responses of any rollout engine become one batch; and how old their tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.batch import PromptBatch, RolloutBatch, images_of, jagged, jagged_from, objects
from hybridrl.errors import DriftError, EngineError
from hybridrl.metrics import Max, Mean, Metrics
from hybridrl.sampler import Sample, join_masks

_AGES = (
    *(("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3", 3, 3), ("4_to_7", 4, 7)),
    ("8_or_more", 8, torch.inf),
)
"""Name, first and last step of each bin of the histogram, the same ones in every run."""


class Answered(NamedTuple):
    """Prompts that are complete, and their responses, those to one prompt adjacent."""

    prompts: PromptBatch
    samples: list[Sample]


def assemble_rollouts(
    prompts: PromptBatch,
    responses: Sequence[Sample],
    *,
    policy_version: int,
    has_versions: bool = False,
) -> RolloutBatch:
    """Put P prompts and P * G responses together, row by row, those to one prompt adjacent.

    With ``has_versions`` tokens may be of earlier weights: each gets its version. An EngineError if
    responses do not list the experts, or the sampling masks, of all their tokens alike.
    """
    num_responses = len(responses) // len(prompts)
    prompt_rows, images_P = prompts.token_ids_PL.unbind(), images_of(prompts)
    tokens, sampled, lengths, images = [], [], [], []
    for row, response in enumerate(responses):
        prompt = response.context
        if prompt is None:
            prompt = prompt_rows[row // num_responses]
        of_prompt = images_P[row // num_responses]
        images.append(of_prompt if response.images is None else response.images)
        lengths.append(len(prompt) + len(response.token_ids))
        tokens += [prompt, response.token_ids]
        all_sampled = torch.ones(len(response.token_ids), dtype=torch.bool)
        sampled.append(all_sampled if response.is_sampled is None else response.is_sampled)
    lengths_B = torch.tensor(lengths)
    turns = [response.turns for response in responses if response.turns is not None]
    is_of_agents = len(turns) == len(responses)
    counts_BL, ids_BM = _masks(responses, lengths_B)
    rollouts = RolloutBatch(
        token_ids_BL=jagged_from(torch.cat(tokens), lengths_B),
        response_mask_BL=_behind_prompts(sampled, lengths_B),
        sampler_logprobs_BL=_behind_prompts([each.logprobs for each in responses], lengths_B),
        prompt_index_B=prompts.prompt_index_P.repeat_interleave(num_responses),
        policy_version_B=torch.tensor(
            [each.weight_version if has_versions else policy_version for each in responses]
        ),
        is_truncated_B=torch.tensor([response.is_truncated for response in responses]),
        is_failed_B=torch.tensor([each.is_failed for each in responses]) if is_of_agents else None,
        routed_experts_BLJK=_routed_experts(responses, lengths_B),
        images_B=None if prompts.images_P is None else objects(images),
        sequence_lengths_BQ=_sequence_lengths(responses),
        turns_BN=jagged(turns) if is_of_agents else None,
        agent_rewards_BL=_of_agents([each.rewards for each in responses], lengths_B),
        players_BL=_of_agents([each.players for each in responses], lengths_B),
        weight_versions_BL=_weight_versions(responses, lengths_B) if has_versions else None,
        mask_counts_BL=counts_BL,
        mask_ids_BM=ids_BM,
        batch_size=[len(responses)],
    )
    if all(response.teacher_JL is not None for response in responses):
        _add_teachers(rollouts, responses, lengths_B)
    return rollouts


def require_known_tokens(rollouts: RolloutBatch, *, vocab_size: int) -> None:
    """Refuse tokens that the trainer's model does not have: it would read beyond its embedding."""
    token_ids = rollouts.token_ids_BL.values()
    num_unknown = int(((token_ids < 0) | (token_ids >= vocab_size)).sum())
    if num_unknown:
        raise DriftError(
            f"the rollout engine returned {num_unknown} token ids outside of 0..{vocab_size - 1}, "
            "which are the model's: it runs another model, or its memory is lost; nothing of this "
            "phase is used. Set rollout.backup_weights=always, or rollout.sleep=false"
        )


def describe_staleness(steps_T: Tensor) -> Metrics:
    """Describe ages of tokens in steps: mean, maximum, and a histogram that ranks can merge."""
    num_tokens = len(steps_T)
    return {
        "rollout/staleness_steps/mean": Mean(float(steps_T.sum()), num_tokens),
        "rollout/staleness_steps/max": Max(float(steps_T.max())),
        **{
            f"rollout/staleness_fraction/{name}": Mean(
                float(((steps_T >= first) & (steps_T < last + 1)).sum()), num_tokens
            )
            for name, first, last in _AGES
        },
    }


def _behind_prompts(rows: Sequence[Tensor], lengths_B: Tensor, *, value: int = 0) -> Tensor:
    """Put what responses have of each token behind prompts, whose tokens have ``value``."""
    ends = zip(rows, lengths_B.tolist(), strict=True)
    padded = [pad(row, (length - len(row), 0), value=value) for row, length in ends]
    return jagged_from(torch.cat(padded), lengths_B)


def _sequence_lengths(responses: Sequence[Sample]) -> Tensor | None:
    """Return the tokens of each sequence; None if no response was put together by a program."""
    lengths = []
    for response in responses:
        if response.context is None:
            return None
        begins = [0, *(len(response.context) + begin for begin in response.sequence_begins)]
        end = len(response.context) + len(response.token_ids)
        lengths.append(torch.tensor([*begins, end]).diff())
    return jagged(lengths)


def _of_agents(columns: Sequence[Tensor | None], lengths_B: Tensor) -> Tensor | None:
    """Lay the column of each response end to end; None if one has none: it is no program's."""
    said = [column for column in columns if column is not None]
    return None if len(said) < len(columns) else _behind_prompts(said, lengths_B)


def _weight_versions(responses: Sequence[Sample], lengths_B: Tensor) -> Tensor:
    rows = []
    for response in responses:
        versions_L = response.versions_L.int()
        if response.is_sampled is not None:
            versions_L = versions_L.masked_fill(~response.is_sampled, -1)
        rows.append(versions_L)
    return _behind_prompts(rows, lengths_B, value=-1)


def _masks(
    responses: Sequence[Sample], lengths_B: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the columns of sampling masks: counts of tokens, and the ids of rows."""
    masks = [response.masks for response in responses if response.masks is not None]
    if not masks:
        return None, None
    drawn = torch.cat([each.token_ids for each in responses])
    ids_M, counts_S = join_masks(masks)
    is_drawn_M = ids_M == drawn.repeat_interleave(counts_S) if len(counts_S) == len(drawn) else None
    if is_drawn_M is None or int(is_drawn_M.sum()) != len(drawn):
        raise EngineError(
            f"the rollout engine drew {len(drawn)} tokens and returned sampling masks of "
            f"{len(counts_S)}, or masks without the token that was drawn; set "
            "rollout.sampling_masks=false"
        )
    counts_BL = _behind_prompts([each.counts_n for each in masks], lengths_B)
    lengths_of_ids_B = torch.tensor([len(each.ids_M) for each in masks])
    return counts_BL, jagged_from(ids_M, lengths_of_ids_B)


def _add_teachers(rollouts: RolloutBatch, responses: Sequence[Sample], lengths_B: Tensor) -> None:
    """Add what served teachers said of the tokens."""
    said = [response.teacher_JL for response in responses if response.teacher_JL is not None]
    ends = zip(said, lengths_B.tolist(), strict=True)
    said_JT = torch.cat([pad(each, (length - each.shape[1], 0)) for each, length in ends], dim=1)
    rollouts.teacher_logprobs_BL = jagged_from(said_JT[0], lengths_B)
    if len(said_JT) > 1:
        logprobs_TK, ids_TK = (columns_KT.T.contiguous() for columns_KT in said_JT[1:].chunk(2))
        rollouts.teacher_top_logprobs_BLK = jagged_from(logprobs_TK, lengths_B)
        rollouts.teacher_top_ids_BLK = jagged_from(ids_TK.int(), lengths_B)


def _routed_experts(responses: Sequence[Sample], lengths_B: Tensor) -> Tensor | None:
    if all(response.routed_experts_LJK is None for response in responses):
        return None
    rows = []
    for row, (response, length) in enumerate(zip(responses, lengths_B.tolist(), strict=True)):
        experts_LJK = response.routed_experts_LJK
        num_tokens = 0 if experts_LJK is None else len(experts_LJK)
        if experts_LJK is None or num_tokens != length - 1:
            raise EngineError(
                f"the rollout engine returned the experts of {num_tokens} tokens of response {row},"
                f" which has {length} with its prompt: all but the last need them; "
                "set actor.replay_routing=false"
            )
        rows.append(pad(experts_LJK, (0, 0, 0, 0, 0, 1), value=-1))
    return jagged_from(torch.cat(rows), lengths_B)
