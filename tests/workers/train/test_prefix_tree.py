from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.batch import jagged, jagged_from
from hybridrl.models.packed_attention import AttentionKernel
from hybridrl.models.packed_model import PolicyModel
from hybridrl.workers.train.microbatcher import BatchRows, lay_out, plan
from tests.drawn import cases
from tests.tiny_models import Family, make_tiny_model
from tests.workers.train.engines import (
    ACTOR,
    build_fsdp2,
    make_batcher,
    make_conversations,
    make_rows,
)
from tests.workers.train.packs import learn, tiny_policy

LEAST = 64
"""Tokens that sequences share behind a prompt, at least."""


def read(sequences: list[list[int]], masks: list[list[int]], rows: list[int]) -> BatchRows:
    """Read sequences of rows of as many as ``rows`` says."""
    of_rows = torch.tensor([len(sequence) for sequence in sequences]).split(rows)
    lengths_B = torch.stack([each.sum() for each in of_rows])
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    mask = torch.tensor([bit for mask in masks for bit in mask], dtype=torch.bool)
    return make_batcher().read(
        jagged_from(tokens, lengths_B),
        jagged_from(mask, lengths_B),
        sequence_lengths_BQ=jagged(of_rows),
    )


def test_a_rewritten_conversation_computes_its_history_once() -> None:
    sequences = [[1, 2, 11, 21], [1, 2, 21, 3, 12, 22], [1, 2, 21, 3, 22, 4, 13, 23]]
    masks = [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]
    rows = read(sequences, masks, [3])
    microbatch = lay_out(rows, [0, 1, 2], make_batcher())
    tokens = microbatch.tokens
    assert sorted(tokens.token_ids_T.tolist()) == [1, 2, 3, 4, 11, 12, 13, 21, 22]
    # Tokens 2, 3 and 4 end a context, and predict what the turn behind it began with.
    predicted = zip(
        tokens.token_ids_T[tokens.scored_S].tolist(), tokens.targets_S.tolist(), strict=True
    )
    assert sorted(predicted) == [(2, 11), (3, 12), (4, 13), (11, 21), (12, 22), (13, 23)]
    assert plan(rows, max_tokens=9) == [[0, 1, 2]]
    assert microbatch.num_tokens == 9


@pytest.mark.parametrize("more", [LEAST, LEAST - 1])
def test_siblings_share_sampled_tokens_from_some_number_on(more: int) -> None:
    same = [1, 2, *[5] * more]
    mask = [0, 0, *[1] * (more + 1)]
    rows = read([[*same, 7], [*same, 8], [1, 2, 9]], [mask, mask, [0, 0, 1]], [1, 1, 1])
    microbatch = lay_out(rows, [0, 1, 2], make_batcher())
    assert microbatch.num_tokens == 2 + (more if more == LEAST else 2 * more)
    scored = microbatch.rows.row_T.tolist()
    assert [scored.count(row) for row in range(3)] == [more + 1, more + 1, 1]
    # What the second shares with the first is not what it shares with the third.
    assert lay_out(rows, [1, 2], make_batcher()).num_tokens == 2 + more


def test_equal_responses_fill_a_micro_batch_with_what_each_is_scored_by() -> None:
    same = [1, 2, *[5] * 100]
    rows = read([same] * 8, [[0, 0, *[1] * 100]] * 8, [1] * 8)
    for numbers in plan(rows, max_tokens=200):
        microbatch = lay_out(rows, numbers, make_batcher())
        assert microbatch.num_tokens == 101
        assert len(microbatch.token_index_S) == 200


def test_a_model_with_states_computes_no_more_tokens_than_the_budget(folder: Path) -> None:
    """Its recurrent layers begin each sequence anew."""
    prompt = torch.arange(40)
    batch = make_rows(8)
    batch.token_ids_BL = jagged([torch.cat([prompt, torch.tensor([n, n])]) for n in range(8)])
    batch.response_mask_BL = jagged([torch.arange(42) >= 40] * 8)
    config = replace(ACTOR, max_tokens_per_microbatch=130)
    expected: dict[Family, int] = {"qwen3_5_text": 3, "qwen3": 8}
    for family, most in expected.items():
        engine = build_fsdp2(make_tiny_model(folder / f"of {family}", family), config=config)
        microbatches = engine.backend.microbatches(batch)
        assert max(len(m.rows.row_T.unique()) for m in microbatches) == most


def test_sequences_of_rows_with_other_prompts_share_nothing() -> None:
    system = list(range(100, 180))
    rows = read([[*system, 1, 7], [*system, 2, 7]], [[0] * 81 + [1]] * 2, [1, 1])
    assert lay_out(rows, [0, 1], make_batcher()).num_tokens == 2 * 81


def test_tokens_of_other_experts_are_not_shared() -> None:
    tokens_BL = jagged([torch.tensor([1, 2, 3, 7, 1, 2, 3, 4, 8])])
    mask_BL = jagged([torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 1]).bool()])
    lengths_BQ = jagged([torch.tensor([4, 5])])
    counts = []
    for other in (None, 8, 2, 0):
        experts = torch.zeros(9, 2, 2, dtype=torch.int16)
        if other is not None:
            experts[other, 1, 0] = 5
        experts_BLJK = jagged_from(experts, torch.tensor([9]))
        rows = make_batcher().read(tokens_BL, mask_BL, experts_BLJK, sequence_lengths_BQ=lengths_BQ)
        counts.append(lay_out(rows, [0, 1], make_batcher()).num_tokens)
    assert counts == [4, 4, 7, 7]


@cache
def policy_of(family: Family, folder: Path) -> PolicyModel:
    return tiny_policy(folder, family)


def assert_same(policy: PolicyModel, rows: BatchRows, kernel: AttentionKernel) -> tuple[int, int]:
    """Compare all sequences in one micro-batch with each alone; return tokens computed."""
    numbers = [*rows.by_number]
    num_tokens, logprobs, grads = learn(policy, rows, [numbers], kernel)
    alone = learn(policy, rows, [[number] for number in numbers], "padded")
    torch.testing.assert_close(logprobs, alone[1], atol=1e-6, rtol=1e-6)
    largest = max(float(grad.abs().max()) for grad in alone[2].values())
    assert grads.keys() == alone[2].keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, alone[2][name], atol=1e-5 * largest, rtol=0, msg=name)
    return num_tokens, alone[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


FAMILIES: list[Family] = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text"]


@pytest.mark.parametrize("kernel", ["padded", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_four_rewritten_turns_and_branches_learn_as_sequences_alone(
    family: Family, kernel: AttentionKernel, folder: Path
) -> None:
    batch, _ = make_conversations(4)
    assert batch.sequence_lengths_BQ is not None
    rows = make_batcher().read(
        batch.token_ids_BL, batch.response_mask_BL, sequence_lengths_BQ=batch.sequence_lengths_BQ
    )
    num_tokens, num_alone = assert_same(policy_of(family, folder / family), rows, kernel)
    assert num_tokens < 0.7 * num_alone


BLOCKS = [
    torch.randint(0, 64, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (1, 3, LEAST, LEAST + 6)
]


@cases(by_day=12, by_night=100)
@given(data=st.data())
def test_random_tries_learn_as_sequences_alone(folder: Path, data: st.DataObject) -> None:
    # Sequences of few blocks, of which some are long enough to be shared.
    blocks = st.lists(st.integers(0, len(BLOCKS) - 1), min_size=1, max_size=4)
    paths = data.draw(st.lists(blocks, min_size=2, max_size=7))
    sequences, masks = [], []
    for path in paths:
        own = [token for block in path for token in BLOCKS[block]]
        # Prompts end where a block does, so that many are equal; what follows is sampled or not.
        prompt = len(BLOCKS[path[0]])
        bits = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
        sequences.append([*BLOCKS[0], *own, data.draw(st.integers(0, 63))])
        rest = [int(bits[at % 4]) for at in range(len(own) - prompt)]
        masks.append([0, *[0] * prompt, *rest, 1])
    cut = data.draw(st.integers(1, len(paths)))
    rows = read(sequences, masks, [n for n in (cut, len(paths) - cut) if n])
    kernel: AttentionKernel = data.draw(st.sampled_from(["padded", "varlen"]))
    num_tokens, num_alone = assert_same(policy_of("qwen3", folder / "qwen3"), rows, kernel)
    distinct = {tuple(each[:end]) for each in sequences for end in range(1, len(each))}
    assert len(distinct) <= num_tokens <= num_alone
