from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.batch import (
    RolloutBatch,
    TrainBatch,
    jagged,
    jagged_from,
    response_lengths,
    row_lengths,
)
from hybridrl.models.divergence import TeacherTokens
from hybridrl.workers.train.model_engine import TOKEN_MEAN
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.teachers import Teachers
from tests.ranks import run_ranks
from tests.tiny_models import make_tiny_model
from tests.workers.train.engines import (
    LOSS,
    add_masks,
    build_fsdp2,
    make_conversations,
    make_rows,
    rows_of,
    to_rollouts,
)

TEMPERATURE, V = 0.9, 64
COMPARING = replace(LOSS, divergence_coefficient=2.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a policy, and two teachers."""
    return [
        make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2, seed=seed)
        for seed in (0, 1, 2)
    ]


def teachers_of(models: Sequence[PolicyEngine], num_likeliest: int = 5) -> Teachers:
    return Teachers(
        models=models,
        temperature=TEMPERATURE,
        vocab_size=V,
        num_likeliest=num_likeliest,
    )


def all_logprobs(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    """Return the distributions that a model of transformers has before response tokens, [T, V]."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0] / TEMPERATURE
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


def tokens_of(taught: TrainBatch) -> TeacherTokens:
    """Return those before response tokens."""
    assert taught.teacher_top_logprobs_BLK is not None
    ids_BLK = taught.teacher_top_ids_BLK
    ids = None if ids_BLK is None else ids_BLK.values()
    return TeacherTokens(taught.teacher_top_logprobs_BLK.values(), ids)[
        taught.response_mask_BL.values()
    ]


def with_teachers(rows: TrainBatch) -> tuple[RolloutBatch, TrainBatch]:
    """Give rows teachers in turns, and these longer prompts of their own."""
    rollouts = to_rollouts(rows)
    prompts = [torch.arange(3 + number, 8 + 2 * number) for number in range(len(rows))]
    masks = rows.response_mask_BL.unbind()
    for batch in (rollouts, rows):
        batch.teacher_B = torch.arange(len(rows)) % 2
        batch.teacher_prompt_BN = jagged(prompts)
        batch.prompt_tokens_B = torch.tensor([int((~mask).sum()) for mask in masks])
    return rollouts, rows


@pytest.mark.parametrize("num_likeliest", [1, 5, V])
def test_each_row_is_taught_by_its_own_teacher_that_reads_a_prompt_of_its_own(
    folders: list[Path], num_likeliest: int
) -> None:
    rollouts, rows = with_teachers(make_rows(6))
    teachers = teachers_of([build_fsdp2(folder) for folder in folders[1:]], num_likeliest)
    logprobs_BL = teachers.logprobs(rollouts)
    tokens = tokens_of(teachers.teach(rows))
    expected, sampled = [], []
    plain = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in folders[1:]]
    assert rows.teacher_prompt_BN is not None
    columns = (rows.token_ids_BL, rows.response_mask_BL, rows.teacher_prompt_BN)
    for row, (ids, mask, prompt) in enumerate(zip(*(c.unbind() for c in columns), strict=True)):
        expected.append(all_logprobs(plain[row % 2], prompt, ids[mask]))
        sampled.append(expected[-1].gather(1, ids[mask][:, None])[:, 0])
    full_SV = torch.cat(expected)
    mask_N = rows.response_mask_BL.values()
    torch.testing.assert_close(logprobs_BL.values()[mask_N], torch.cat(sampled), atol=1e-4, rtol=0)
    assert not logprobs_BL.values()[~mask_N].any()
    expected_SK, ids_SK = full_SV, None
    if num_likeliest < V:
        expected_SK, ids_SK = full_SV.topk(num_likeliest)
        assert tokens.ids_SK is not None
        assert torch.equal(tokens.ids_SK.long(), ids_SK)
    torch.testing.assert_close(tokens.logprobs_SK, expected_SK, atol=1e-4, rtol=0)


def test_prompts_of_teachers_beside_sampling_masks_conversations_and_tokens_that_were_taken_out(
    folders: list[Path],
) -> None:
    teachers = teachers_of([build_fsdp2(folder) for folder in folders[1:]])
    rollouts, rows = with_teachers(make_rows(6))
    whole = teachers.logprobs(rollouts).values()
    # A row that a program made says of how many tokens its one sequence is.
    lengths_B = row_lengths(rows.token_ids_BL)
    rollouts.sequence_lengths_BQ = jagged(list(lengths_B[:, None]))
    assert torch.equal(teachers.logprobs(rollouts).values(), whole)
    # Sampling masks stay with the tokens of the response.
    masked, _ = with_teachers(add_masks(make_rows(6)))
    higher = teachers.logprobs(masked).values() - whole
    is_response_N = rows.response_mask_BL.values()
    assert (higher[is_response_N] > 0.1).all()
    # What a filter takes out of the loss is read all the same.
    taught = tokens_of(teachers.teach(rows)).logprobs_SK
    is_left_N = is_response_N & (torch.arange(len(is_response_N)) % 2 == 0)
    rows.response_mask_BL = jagged_from(is_left_N, lengths_B)
    left = tokens_of(teachers.teach(rows)).logprobs_SK
    torch.testing.assert_close(left, taught[is_left_N[is_response_N]], atol=1e-6, rtol=0)


def test_a_teachers_prompt_stands_before_the_first_of_several_chats(folders: list[Path]) -> None:
    teachers = teachers_of([build_fsdp2(folders[1])])
    together, alone = make_conversations(2)
    rollouts, single = to_rollouts(together), to_rollouts(alone)
    rollouts.sequence_lengths_BQ = together.sequence_lengths_BQ
    prompts = [torch.arange(3, 12), torch.arange(20, 23)]
    rollouts.teacher_prompt_BN = jagged(prompts)
    rollouts.prompt_tokens_B = torch.tensor([5, 5])
    whole = teachers.logprobs(rollouts).values()
    rows = [row for row in single.token_ids_BL.unbind()]
    masks = [mask for mask in single.response_mask_BL.unbind()]
    for number, prompt in zip((0, 4), prompts, strict=True):  # the first sequences of the two rows
        rows[number] = torch.cat([prompt, rows[number][5:]])
        masks[number] = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), masks[number][5:]])
    single.token_ids_BL, single.response_mask_BL = jagged(rows), jagged(masks)
    expected = teachers.logprobs(single).values()[single.response_mask_BL.values()]
    is_sampled_N = together.response_mask_BL.values()
    torch.testing.assert_close(whole[is_sampled_N], expected, atol=1e-5, rtol=0)


def _learn(engine: PolicyEngine, teachers: Teachers | None, rows: TrainBatch) -> list[float]:
    """Take a step, and return the divergence's share of the loss, and the gradient's norm."""
    loss = LOSS if teachers is None else COMPARING
    metrics = engine.update(
        rows if teachers is None else teachers.teach(rows),
        loss=loss,
        aggregation=TOKEN_MEAN,
        temperature=TEMPERATURE,
        max_response_tokens=8,
        beta=0.3,
    )
    divergence = metrics.get("loss/divergence")
    return [0.0 if divergence is None else divergence.value, metrics["policy/grad_norm"].value]


def _learn_on_a_rank(rank: int, folders: list[Path], num_ranks: int) -> list[float]:
    _, rows = with_teachers(make_rows(8))
    engine, *models = (build_fsdp2(folder) for folder in folders)
    return _learn(engine, teachers_of(models), rows_of(rows, range(rank, 8, num_ranks)))


def test_ranks_learn_together_what_one_learns_alone(folders: list[Path]) -> None:
    # Of two ranks, each has rows of one of the teachers alone.
    (alone,) = run_ranks(1, _learn_on_a_rank, folders, 1)
    two = run_ranks(2, _learn_on_a_rank, folders, 2)
    counts_B = response_lengths(make_rows(8).response_mask_BL)
    lengths = [int(counts_B[rank::2].sum()) for rank in range(2)]
    weighed = sum(n * loss for n, (loss, _) in zip(lengths, two, strict=True)) / sum(lengths)
    assert weighed == pytest.approx(alone[0], rel=1e-5)
    assert [norm for _, norm in two] == pytest.approx([alone[1]] * 2, rel=1e-4)


def test_a_policy_comes_nearer_to_its_teacher_and_an_equal_one_stays(folders: list[Path]) -> None:
    policy, teacher = (build_fsdp2(folder) for folder in folders[:2])
    rows = make_rows(8)
    rows.advantages_BL = rows.advantages_BL * 0.0  # the divergence alone
    first, *_, last = (_learn(policy, teachers_of([teacher]), rows)[0] for _ in range(8))
    assert 0 < last < 0.8 * first
    equal = build_fsdp2(folders[0])
    assert _learn(equal, teachers_of([equal]), rows) == pytest.approx([0.0, 0.0], abs=1e-5)
