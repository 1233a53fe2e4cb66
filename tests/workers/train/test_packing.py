from __future__ import annotations

import torch

from hybridrl.batch import jagged, jagged_from, row_lengths
from hybridrl.models.packed_share import ContextParallelRank
from hybridrl.workers.train.packing import Pack, RowPacker

CPU = torch.device("cpu")


def packer() -> RowPacker:
    rows = [[10, 11, 12], [20, 21, 22, 23], [30, 31], [40]]
    masks = [[0, 0, 1], [0, 1, 0, 1], [0, 0], [0]]
    return RowPacker(
        jagged([torch.tensor(row) for row in rows]),
        jagged([torch.tensor(mask, dtype=torch.bool) for mask in masks]),
        kernel="padded",
        device=CPU,
    )


def test_rows_lie_end_to_end_without_their_last_token() -> None:
    pack = packer().pack([1, 0])
    assert pack.tokens.token_ids_T.tolist() == [20, 21, 22, 10, 11]
    assert pack.tokens.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert pack.tokens.scored_S.tolist() == [0, 2, 4]
    assert pack.tokens.targets_S.tolist() == [21, 23, 12]
    assert pack.place_S.tolist() == [4, 6, 2]
    assert pack.row_S.tolist() == [1, 1, 0]


def test_rows_without_a_response_are_not_planned() -> None:
    assert packer().plan(100) == [[1, 0]]
    assert packer().plan(3) == [[1], [0]]
    assert packer().response_lengths_B.tolist() == [1, 2, 0, 0]


def test_siblings_follow_one_copy_of_their_prompt() -> None:
    rows = [[7, 8, 1, 2], [9, 4, 5, 6], [7, 8, 3], [7, 8, 9, 5, 6]]
    masks = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1], [0, 0, 1, 0, 1]]
    packer = RowPacker(
        jagged([torch.tensor(row) for row in rows]),
        jagged([torch.tensor(mask, dtype=torch.bool) for mask in masks]),
        kernel="padded",
        device=CPU,
    )
    pack = packer.pack([0, 1, 2, 3])
    assert pack.tokens.token_ids_T.tolist() == [9, 4, 5, 7, 8, 9, 5, 1]
    assert pack.tokens.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 2]
    scored = zip(
        pack.row_S.tolist(),
        pack.tokens.scored_S.tolist(),
        pack.tokens.targets_S.tolist(),
        strict=True,
    )
    # Token 8 at place 4 predicts what each sibling answers first.
    assert sorted(scored) == [
        *((0, 4, 1), (0, 7, 2)),
        *((1, 0, 4), (1, 1, 5), (1, 2, 6)),
        (2, 4, 3),
        *((3, 4, 9), (3, 6, 6)),
    ]
    assert packer.plan(6) == [[0, 2, 3], [1]]
    assert packer.plan(4) == [[3], [0, 2], [1]]


def test_a_filler_scores_nothing() -> None:
    filler = packer().pack([])
    assert len(filler.tokens.token_ids_T) == 1
    assert len(filler.place_S) == len(filler.row_S) == len(filler.tokens.targets_S) == 0


def test_experts_lie_beside_their_tokens_and_padding_has_none() -> None:
    tokens_BL = jagged([torch.tensor(row) for row in ([10, 11, 12], [20, 21, 22, 23])])
    experts = torch.arange(7 * 2 * 3, dtype=torch.int16).view(7, 2, 3)
    packer = RowPacker(
        tokens_BL,
        jagged([torch.tensor([0, 0, 1]).bool(), torch.tensor([0, 1, 0, 1]).bool()]),
        kernel="padded",
        device=CPU,
        multiple=4,
        routed_experts_BLJK=jagged_from(experts, row_lengths(tokens_BL)),
    )
    pack = packer.pack([1, 0])
    assert pack.tokens.experts_TJK is not None
    assert torch.equal(pack.tokens.experts_TJK[:5], experts[[3, 4, 5, 0, 1]])
    assert pack.tokens.experts_TJK[5:].unique().tolist() == [-1]
    assert (pack.tokens.num_padding, pack.num_tokens) == (3, 5)
    filler = packer.pack([])
    assert filler.tokens.experts_TJK is not None
    assert filler.tokens.experts_TJK.unique().tolist() == [-1]
    assert (len(filler.tokens.experts_TJK), filler.num_tokens) == (4, 0)


def test_siblings_share_a_prompt_only_where_it_went_through_the_same_experts() -> None:
    rows = [[7, 8, 1, 2], [7, 8, 3], [7, 8, 9, 5, 6]]
    masks = [[0, 0, 1, 1], [0, 0, 1], [0, 0, 1, 0, 1]]
    tokens_BL = jagged([torch.tensor(row) for row in rows])
    experts = torch.zeros(12, 2, 2, dtype=torch.int16)
    experts[2:4] = experts[9:] = 5  # after the prompts they may differ
    experts[5, 1, 1] = 3  # in the prompt of the second
    packer = RowPacker(
        tokens_BL,
        jagged([torch.tensor(mask).bool() for mask in masks]),
        kernel="padded",
        device=CPU,
        routed_experts_BLJK=jagged_from(experts, row_lengths(tokens_BL)),
    )
    pack = packer.pack([0, 1, 2])
    assert pack.tokens.token_ids_T.tolist() == [7, 8, 7, 8, 9, 5, 1]
    assert pack.tokens.experts_TJK is not None
    assert pack.tokens.experts_TJK[:, 1, 1].tolist() == [0, 0, 0, 3, 5, 5, 5]


def test_shares_of_a_pack_score_each_token_once_and_count_the_whole() -> None:
    rows = [[7, 8, 1, 2], [9, 4, 5, 6], [7, 8, 3], [7, 8, 9, 5, 6]]
    masks = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 1], [0, 0, 1, 0, 1]]
    batch = (
        jagged([torch.tensor(row) for row in rows]),
        jagged([torch.tensor(mask, dtype=torch.bool) for mask in masks]),
    )
    whole, *shared = (
        RowPacker(*batch, kernel="padded", device=CPU, multiple=2, share=share).pack([0, 1, 2, 3])
        for share in (
            None,
            ContextParallelRank(0, 2, torch.clone),
            ContextParallelRank(1, 2, torch.clone),
        )
    )
    assert {len(pack.tokens.token_ids_T) for pack in shared} == {4}
    assert {(pack.num_tokens, pack.num_scored) for pack in [whole, *shared]} == {(8, 8)}
    found = [entry for pack in shared for entry in scored(pack)]
    assert sorted(found) == sorted(scored(whole))


def test_each_share_of_a_filler_has_a_token_and_scores_nothing() -> None:
    for rank in range(2):
        share = ContextParallelRank(rank, 2, torch.clone)
        one = jagged([torch.tensor([1, 2])])
        mask = jagged([torch.tensor([False, True])])
        filler = RowPacker(one, mask, kernel="padded", device=CPU, share=share).pack([])
        assert (len(filler.tokens.token_ids_T), len(filler.place_S), filler.num_tokens) == (1, 0, 0)


def scored(pack: Pack) -> list[tuple[int, int, int, int, int]]:
    """Return the token, its position, what it is to predict, and where that is in the batch."""
    tokens = pack.tokens
    at_S = tokens.scored_S
    columns = (tokens.token_ids_T[at_S], tokens.positions_T[at_S], tokens.targets_S)
    return list(zip(*(c.tolist() for c in (*columns, pack.place_S, pack.row_S)), strict=True))
