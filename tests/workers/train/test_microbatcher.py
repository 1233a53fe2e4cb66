from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.batch import SupervisedBatch, jagged, jagged_from, row_lengths
from hybridrl.errors import DispatchError
from hybridrl.models.packed_share import ContextParallelRank
from hybridrl.trainer.train_batch import balance_over_ranks
from hybridrl.workers.train.microbatcher import (
    BatchRows,
    MicroBatch,
    lay_out,
    plan,
    plan_microbatches,
)
from tests.drawn import cases
from tests.workers.train.engines import make_batcher

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200))
def test_few_microbatches_hold_every_row_by_its_length_within_the_token_budget(
    lengths: list[int], max_tokens: int
) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens)
    in_order = [row for rows in plan for row in rows]
    assert sorted(in_order) == list(range(len(lengths)))
    assert [lengths[row] for row in in_order] == sorted(lengths, reverse=True)
    tokens = [sum(lengths[row] for row in rows) for rows in plan]
    for rows, num_tokens in zip(plan, tokens, strict=True):
        assert len(rows) == 1 or num_tokens <= max_tokens
    # Two neighbours never fit in one: half-full at worst.
    assert len(plan) <= 2 * sum(lengths) / max_tokens + 1


def test_microbatches_are_nearly_equal() -> None:
    # First fit would give 100 + 100 + 20 tokens.
    plan = plan_microbatches([10] * 22, max_tokens=100)
    assert sorted(len(rows) for rows in plan) == [6, 8, 8]


def test_one_rank_keeps_the_order_of_its_rows() -> None:
    assert balance_over_ranks([3, 9, 1, 7], dp_size=1, num_minibatches=2) == [0, 1, 2, 3]


def prompt_of(num_tokens: int, first: int = 0) -> bytes:
    return torch.arange(first, first + num_tokens).numpy().tobytes()


def computed(rows: list[int], responses: list[int], prompts: list[bytes]) -> int:
    own = {prompts[row] for row in rows}
    return sum(responses[row] for row in rows) + sum(len(prompt) // 8 for prompt in own)


@given(
    responses=st.lists(st.integers(0, 1000), min_size=24, max_size=24),
    prompt_tokens=st.lists(st.integers(0, 1000), min_size=24, max_size=24),
    group_size=st.sampled_from([1, 4, 8, 24]),
    dp_size=st.sampled_from([1, 2, 3, 4]),
    num_minibatches=st.sampled_from([1, 2]),
)
def test_balancing_deals_each_minibatch_out_to_all_ranks(
    responses: list[int],
    prompt_tokens: list[int],
    group_size: int,
    dp_size: int,
    num_minibatches: int,
) -> None:
    prompts = [prompt_of(prompt_tokens[row // group_size]) for row in range(24)]
    lengths = [n + len(prompt) // 8 for n, prompt in zip(responses, prompts, strict=True)]
    order = balance_over_ranks(
        lengths, dp_size=dp_size, num_minibatches=num_minibatches, prompts_B=prompts
    )
    assert sorted(order) == list(range(24))
    size = 24 // num_minibatches
    share = size // dp_size
    for minibatch in range(num_minibatches):
        shares = [
            order[rank * (24 // dp_size) + minibatch * share :][:share] for rank in range(dp_size)
        ]
        given_rows = list(range(minibatch * size, (minibatch + 1) * size))
        assert sorted(row for rows in shares for row in rows) == given_rows
        unbalanced = [given_rows[rank * share :][:share] for rank in range(dp_size)]
        busiest, of_given = (
            max(computed(rows, responses, prompts) for rows in each)
            for each in (shares, unbalanced)
        )
        assert busiest <= of_given


def test_a_group_stays_on_one_rank_where_its_prompt_is_long() -> None:
    # One by one in the order of their lengths, every rank would get a row of each group.
    lengths = [100 + n for n in range(4) for _ in range(4)]
    groups = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    prompts = [prompt_of(90, first=row // 4) for row in range(16)]
    order = balance_over_ranks(lengths, dp_size=4, num_minibatches=1, prompts_B=prompts)
    assert sorted(order[rank * 4 :][:4] for rank in range(4)) == groups
    apart = balance_over_ranks(lengths, dp_size=4, num_minibatches=1)
    assert len({row // 4 for row in apart[:4]}) == 4


def test_indivisible_rows_are_rejected_with_legal_sizes() -> None:
    with pytest.raises(DispatchError, match=r"cannot divide 10 rows .* rollout.\w+ 8 or 12"):
        balance_over_ranks([1] * 10, dp_size=2, num_minibatches=2)


BATCHER = make_batcher()


def columns_of(rows: list[list[int]], masks: list[list[int]]) -> tuple[Tensor, Tensor]:
    return (
        jagged([torch.tensor(row) for row in rows]),
        jagged([torch.tensor(mask, dtype=torch.bool) for mask in masks]),
    )


SIBLINGS = columns_of(
    [[7, 8, 1, 2], [9, 4, 5, 6], [7, 8, 3], [7, 8, 9, 5, 6]],
    [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1], [0, 0, 1, 0, 1]],
)
"""Rows 0, 2 and 3 have the same prompt."""


def batch_rows() -> BatchRows:
    return BATCHER.read(
        *columns_of(
            [[10, 11, 12], [20, 21, 22, 23], [30, 31], [40]], [[0, 0, 1], [0, 1, 0, 1], [0, 0], [0]]
        )
    )


def test_rows_lie_end_to_end_without_their_last_token() -> None:
    microbatch = lay_out(batch_rows(), [1, 0], BATCHER)
    assert microbatch.tokens.token_ids_T.tolist() == [20, 21, 22, 10, 11]
    assert microbatch.tokens.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert microbatch.tokens.scored_S.tolist() == [0, 2, 4]
    assert microbatch.tokens.targets_S.tolist() == [21, 23, 12]
    assert microbatch.token_index_S.tolist() == [4, 6, 2]
    assert microbatch.rows.row_T.tolist() == [1, 1, 0]


def test_rows_without_a_response_are_not_planned() -> None:
    assert plan(batch_rows(), max_tokens=100) == [[1, 0]]
    assert plan(batch_rows(), max_tokens=3) == [[1], [0]]
    assert batch_rows().response_lengths_B.tolist() == [1, 2, 0, 0]


def test_responses_follow_one_copy_of_their_prompt() -> None:
    rows = BATCHER.read(*SIBLINGS)
    microbatch = lay_out(rows, [0, 1, 2, 3], BATCHER)
    assert microbatch.tokens.token_ids_T.tolist() == [9, 4, 5, 7, 8, 9, 5, 1]
    assert microbatch.tokens.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 2]
    predictions = zip(
        microbatch.rows.row_T.tolist(),
        microbatch.tokens.scored_S.tolist(),
        microbatch.tokens.targets_S.tolist(),
        strict=True,
    )
    # Token 8 at place 4 predicts the first response token of each of its rows.
    assert sorted(predictions) == [
        *((0, 4, 1), (0, 7, 2)),
        *((1, 0, 4), (1, 1, 5), (1, 2, 6)),
        (2, 4, 3),
        *((3, 4, 9), (3, 6, 6)),
    ]
    assert plan(rows, max_tokens=6) == [[0, 2, 3], [1]]
    assert plan(rows, max_tokens=4) == [[3], [0, 2], [1]]


def test_a_dummy_scores_nothing() -> None:
    dummy = lay_out(batch_rows(), [], BATCHER)
    assert len(dummy.tokens.token_ids_T) == 1
    assert len(dummy.token_index_S) == len(dummy.rows.row_T) == len(dummy.tokens.targets_S) == 0


def test_micro_batches_count_what_they_compute() -> None:
    microbatches = make_batcher(max_tokens=6, group_size=3).divide(
        SupervisedBatch(token_ids_BL=SIBLINGS[0], response_mask_BL=SIBLINGS[1], batch_size=[4])
    )
    assert len(microbatches) == len(list(microbatches)) == 3
    assert [microbatch.num_tokens for microbatch in microbatches] == [5, 3, 0]
    assert (microbatches.num_tokens, microbatches.num_values) == (8, 16)


def test_padding_behind_a_shared_prompt_fits_the_varlen_kernel() -> None:
    batcher = make_batcher("varlen", multiple=3)
    microbatch = lay_out(batcher.read(*SIBLINGS), [0, 1, 2, 3], batcher)
    assert (len(microbatch.tokens.token_ids_T), microbatch.tokens.num_padding) == (9, 1)


def test_experts_lie_beside_their_tokens_and_padding_has_none() -> None:
    tokens_BL, mask_BL = columns_of([[10, 11, 12], [20, 21, 22, 23]], [[0, 0, 1], [0, 1, 0, 1]])
    experts = torch.arange(7 * 2 * 3, dtype=torch.int16).view(7, 2, 3)
    batcher = make_batcher(multiple=4)
    rows = batcher.read(tokens_BL, mask_BL, jagged_from(experts, row_lengths(tokens_BL)))
    microbatch = lay_out(rows, [1, 0], batcher)
    assert microbatch.tokens.experts_TJK is not None
    assert torch.equal(microbatch.tokens.experts_TJK[:5], experts[[3, 4, 5, 0, 1]])
    assert microbatch.tokens.experts_TJK[5:].unique().tolist() == [-1]
    assert (microbatch.tokens.num_padding, microbatch.num_tokens) == (3, 5)
    dummy = lay_out(rows, [], batcher)
    assert dummy.tokens.experts_TJK is not None
    assert dummy.tokens.experts_TJK.unique().tolist() == [-1]
    assert (len(dummy.tokens.experts_TJK), dummy.num_tokens) == (4, 0)
    assert dummy.tokens.num_padding == 4


def test_shares_of_a_micro_batch_score_each_token_once() -> None:
    whole, *shared = (
        lay_out(batcher.read(*SIBLINGS), [0, 1, 2, 3], batcher)
        for share in (
            None,
            ContextParallelRank(0, 2, torch.clone),
            ContextParallelRank(1, 2, torch.clone),
        )
        for batcher in [make_batcher(multiple=2, share=share)]
    )
    assert {len(part.tokens.token_ids_T) for part in shared} == {4}
    assert {(part.num_tokens, part.rows.num_tokens) for part in [whole, *shared]} == {(8, 8)}
    for rank in range(2):
        batcher = make_batcher(share=ContextParallelRank(rank, 2, torch.clone))
        dummy = lay_out(batcher.read(*columns_of([[1, 2]], [[0, 1]])), [], batcher)
        assert len(dummy.tokens.token_ids_T) == 1
        assert (len(dummy.token_index_S), dummy.num_tokens) == (0, 0)
    predictions = [entry for part in shared for entry in predicted(part)]
    assert sorted(predictions) == sorted(predicted(whole))


def predicted(microbatch: MicroBatch) -> list[tuple[int, ...]]:
    """Return the token, its position, its target, and where that is in the batch."""
    tokens = microbatch.tokens
    at_S = tokens.scored_S
    columns = (
        *(tokens.token_ids_T[at_S], tokens.positions_T[at_S], tokens.targets_S),
        *(microbatch.token_index_S, microbatch.rows.row_T),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_rows_that_belong_together_share_a_micro_batch() -> None:
    pairs = columns_of(
        [[7, 8, 1, 2], [7, 8, 3, 2], [7, 8, 4, 2], [7, 8, 5, 2], [9, 1, 1], [9, 2, 2]],
        [[0, 0, 1, 1]] * 4 + [[0, 1, 1]] * 2,
    )
    rows = BATCHER.read(*pairs)
    assert plan(rows, max_tokens=4, num_together=2) == [[0, 1], [2, 3], [4, 5]]
    assert plan(rows, max_tokens=1, num_together=2) == [[0, 1], [2, 3], [4, 5]]
    assert plan(rows, max_tokens=6, num_together=2) == [[0, 1, 2, 3], [4, 5]]
    # Ranks that share tokens, and attend with the varlen kernel, compute each prompt by itself.
    share = ContextParallelRank(rank=0, size=2, gather=lambda x: x)
    apart = make_batcher("varlen", share=share).read(*pairs)
    assert plan(apart, max_tokens=5, num_together=2) == [[0, 1], [2, 3], [4, 5]]
    assert plan(apart, max_tokens=12, num_together=2) == [[0, 1], [2, 3, 4, 5]]


@cases(by_day=25, by_night=200)
@given(data=st.data())
def test_sequences_are_scored_as_rows_of_their_own(data: st.DataObject) -> None:
    masks = st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=3)
    masks_BQ = data.draw(st.lists(masks, min_size=1, max_size=4))
    masks_Q = [[0, *mask] for masks in masks_BQ for mask in masks]
    # Few words, so that sequences share prompts.
    words = st.lists(st.integers(1, 2), min_size=6, max_size=6)
    tokens_Q = [data.draw(words)[: len(mask)] for mask in masks_Q]
    batcher = make_batcher(data.draw(st.sampled_from(["padded", "varlen"])))
    lengths_BQ = jagged([torch.tensor([1 + len(m) for m in masks]) for masks in masks_BQ])
    lengths_B = torch.stack([lengths.sum() for lengths in lengths_BQ.unbind()])
    row_of_Q = torch.arange(len(masks_BQ)).repeat_interleave(row_lengths(lengths_BQ))
    apart_BL = columns_of(tokens_Q, masks_Q)
    apart = batcher.read(*apart_BL)

    joined = batcher.read(
        *(jagged_from(column.values(), lengths_B) for column in apart_BL),
        sequence_lengths_BQ=lengths_BQ,
    )

    numbers = [*joined.by_number]
    assert numbers == [*apart.by_number]
    computed, expected = (lay_out(rows, numbers, batcher) for rows in (joined, apart))
    assert computed.num_tokens <= sum(each.num_tokens for each in joined.by_number.values())
    of_rows = [(*columns, int(row_of_Q[number])) for *columns, number in predicted(expected)]
    assert sorted(predicted(computed)) == sorted(of_rows)
    planned = plan(joined, max_tokens=data.draw(st.integers(1, 12)))
    assert sorted(number for microbatch in planned for number in microbatch) == numbers
    rows = [row for microbatch in planned for row in {joined.by_number[n].row for n in microbatch}]
    assert len(rows) == len(set(rows))  # all sequences of a row are together
