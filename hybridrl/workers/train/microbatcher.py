"""From jagged batches to packed micro-batches: rows laid end to end, as many on every rank.

``plan`` and ``lay_out`` skip the last token of a sequence, which predicts no token, and sequences
without a response. What sequences of a micro-batch begin with is computed once (``prefix_tree``):
the prompt of a group, the earlier turns of a rewritten conversation. Gradients equal those of
single sequences. Most rows are one sequence; all of a row are in the same micro-batch.

Legend: B rows of the batch, Q sequences of a row, L tokens of a row, N tokens of all rows, K spans
of a micro-batch, F tokens of its sequences, T packed tokens, U those of this rank, S scored
(response) tokens, R sequences with a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.algorithms.token_rows import TokenRows
from hybridrl.batch import (
    CriticBatch,
    PreferenceBatch,
    RolloutBatch,
    SupervisedBatch,
    TrainBatch,
    jagged_from,
    response_lengths,
    row_lengths,
)
from hybridrl.errors import DataError
from hybridrl.images import Images, ImageSettings
from hybridrl.models.divergence import TeacherTokens
from hybridrl.models.packed_attention import (
    AttentionKernel,
    PackLayout,
    Runs,
    Segment,
    build_layout,
    tokens_of,
)
from hybridrl.models.packed_model import PackedTokens
from hybridrl.models.packed_share import (
    ContextParallelRank,
    deal_out,
    split_for_context_parallel,
)
from hybridrl.models.seeing import RowImages
from hybridrl.sampler import SamplingMasks
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.prefix_tree import BatchSequence, SharedPrefixes, Tree

Rows: TypeAlias = RolloutBatch | TrainBatch | SupervisedBatch | CriticBatch | PreferenceBatch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that are computed together, or this rank's share of them."""

    tokens: PackedTokens  # on the device
    token_index_S: Tensor  # int64, on the host: each scored token among the batch's flat values
    rows: TokenRows  # of scored tokens, numbered as in the batch, on the device
    num_tokens: int  # without padding, on all ranks that share the micro-batch; 0 in a dummy one


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one batch, on the host."""

    token_ids_N: Tensor
    is_response_N: Tensor
    experts_NJK: Tensor | None  # the experts of each token; None lets the model choose
    response_lengths_B: Tensor  # int64
    by_number: dict[int, BatchSequence]  # of sequences that have a response
    prefixes: SharedPrefixes
    patches_N: Tensor | None = None  # int64, as which a token's patches count, besides itself
    has_states: bool = False  # see MicroBatcher
    images: RowImages | None = None  # None: the model has no tower
    masks: SamplingMasks | None = None  # of all tokens, empty where none was sampled
    teacher: TeacherTokens | None = None  # for each token; None: not compared with a teacher


@dataclass(frozen=True, slots=True)
class MicroBatcher:
    """Divides this rank's batches into micro-batches."""

    kernel: AttentionKernel  # the attention of the model
    max_tokens: int  # of a micro-batch; a single longer row is alone in its own
    ranks: Ranks  # data-parallel ones, which compute equally many micro-batches
    device: torch.device
    multiple: int = 1  # padding makes the tokens of a micro-batch on each rank divisible by it
    share: ContextParallelRank | None = None  # this rank's part of each micro-batch; None: all
    group_size: int = 1  # of a schedule: divides the number of micro-batches
    images: ImageSettings | None = None  # of a model that sees
    has_states: bool = False  # recurrent layers compute also what sequences share in each
    counts_patches: bool = False  # of images as tokens, where a tower learns; see docs/memory.md

    def read(
        self,
        token_ids_BL: Tensor,
        response_mask_BL: Tensor,
        experts_BLJK: Tensor | None = None,
        *,
        sequence_lengths_BQ: Tensor | None = None,
        images_B: Sequence[Images] | None = None,
    ) -> BatchRows:
        """Locate sequences and their responses; without ``sequence_lengths_BQ`` one a row.

        Rows are a tree if their first prompts are the same, with the same images; with experts,
        only if the prompt's tokens went through the same ones. The sampler may have chosen others
        in another batch.
        """
        # Ranks that gather keys for the varlen kernel compute each prompt by itself.
        sees_all = self.share is None or self.share.exchange is not None
        shares = self.kernel == "padded" or sees_all
        token_ids_N, mask_N = token_ids_BL.values(), response_mask_BL.values()
        experts_NJK = None if experts_BLJK is None else experts_BLJK.values()
        lengths, num_scored_B = row_lengths(token_ids_BL), response_lengths(response_mask_BL)
        row_of, num_scored = torch.arange(len(lengths)), num_scored_B
        if sequence_lengths_BQ is not None:
            lengths = sequence_lengths_BQ.values()
            row_of = row_of.repeat_interleave(row_lengths(sequence_lengths_BQ))
            num_scored = response_lengths(jagged_from(mask_N, lengths))
        images, marked_N = None, token_ids_N
        if self.images is not None:
            images_B = [()] * len(token_ids_BL) if images_B is None else images_B
            images = RowImages.of(token_ids_BL, images_B, self.images, lengths)
            marked_N = images.marked_N
        begins = lengths.cumsum(0) - lengths
        kept_R = num_scored.nonzero()[:, 0]
        first_R = mask_N.nonzero()[:, 0][(num_scored.cumsum(0) - num_scored)[kept_R]]
        columns_R = (kept_R, row_of[kept_R], begins[kept_R], lengths[kept_R], first_R)
        sequences, trees = {}, dict[int, bytes]()
        for number, row, begin, length, first in zip(*(c.tolist() for c in columns_R), strict=True):
            if first == begin:
                raise DataError(
                    f"row {row} of the batch begins with a response token, which no token "
                    "predicts; give every row a prompt of at least one token"
                )
            if row not in trees or not shares:
                prompt = slice(begin, first)
                trees[row] = _identify(prompt, marked_N, experts_NJK) if shares else b"%d" % number
            sequences[number] = BatchSequence(row, begin, length - 1, first - begin, trees[row])
        patches_N = None
        if self.counts_patches and images is not None:
            patches_N = (images.image_N >= 0) * (images.settings.merge**2 - 1)
        prefixes = SharedPrefixes.of(sequences, marked_N, experts_NJK)
        return BatchRows(
            *(token_ids_N, mask_N, experts_NJK, num_scored_B, sequences, prefixes, patches_N),
            has_states=self.has_states,
            images=images,
        )

    def divide(self, batch: Rows, experts_BLJK: Tensor | None = None) -> MicroBatches:
        """Plan this rank's micro-batches; a collective call.

        All ranks get equally many micro-batches, at least one; some may be dummies.
        """
        sequence_lengths_BQ, images_B, masks, teacher = None, None, None, None
        if not isinstance(batch, SupervisedBatch | PreferenceBatch):
            sequence_lengths_BQ = batch.sequence_lengths_BQ
        if not isinstance(batch, CriticBatch) and batch.images_B is not None:
            images_B = list(batch.images_B)
        if isinstance(batch, RolloutBatch | TrainBatch):
            ids_BM, counts_BL = batch.mask_ids_BM, batch.mask_counts_BL
            if ids_BM is not None and counts_BL is not None:
                masks = SamplingMasks(ids_BM.values(), counts_BL.values())
        if isinstance(batch, TrainBatch) and batch.teacher_top_logprobs_BLK is not None:
            ids_BLK = batch.teacher_top_ids_BLK
            ids_NK = None if ids_BLK is None else ids_BLK.values()
            teacher = TeacherTokens(batch.teacher_top_logprobs_BLK.values(), ids_NK)
        rows = self.read(
            batch.token_ids_BL,
            batch.response_mask_BL,
            experts_BLJK,
            sequence_lengths_BQ=sequence_lengths_BQ,
            images_B=images_B,
        )
        rows = replace(rows, masks=masks, teacher=teacher)
        num_together = 2 if isinstance(batch, PreferenceBatch) else 1
        planned = plan(rows, max_tokens=self.max_tokens, num_together=num_together)
        most = int(self.ranks.gather([len(planned)]).max())
        num_microbatches = -(-max(most, 1) // self.group_size) * self.group_size
        dummies: list[list[int]] = [[]] * (num_microbatches - len(planned))
        return MicroBatches(self, rows, planned + dummies)


class MicroBatches:
    """The micro-batches of one batch; iterating lays them out one by one."""

    def __init__(self, batcher: MicroBatcher, rows: BatchRows, planned: list[list[int]]) -> None:
        self._batcher = batcher
        self._rows = rows
        self._planned = planned

    @property
    def response_lengths_B(self) -> Tensor:
        """Response tokens of each row, int64."""
        return self._rows.response_lengths_B

    @property
    def num_values(self) -> int:
        """Tokens of all rows of the batch, computed or not."""
        return len(self._rows.token_ids_N)

    @property
    def num_tokens(self) -> int:
        """Tokens of all micro-batches without padding; what sequences share counts once."""
        num_tokens = 0
        for numbers in self._planned:
            for number, skip in self._rows.prefixes.branches(numbers).items():
                num_tokens += self._rows.by_number[number].num_tokens - skip
        return num_tokens

    def __len__(self) -> int:
        return len(self._planned)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (lay_out(self._rows, numbers, self._batcher) for numbers in self._planned)


def plan(rows: BatchRows, *, max_tokens: int, num_together: int = 1) -> list[list[int]]:
    """Return the sequences of each micro-batch of at most ``max_tokens`` tokens.

    A group that is too long for one micro-batch is divided, but not within a row, nor between rows
    that belong together. Longer rows, with those that belong to them, get their own.
    """
    by_unit: dict[int, list[int]] = {}  # sequences that belong together
    for number, sequence in rows.by_number.items():
        by_unit.setdefault(sequence.row // num_together, []).append(number)
    by_tree: dict[bytes, list[list[int]]] = {}  # of their first
    for unit in by_unit.values():
        by_tree.setdefault(rows.by_number[unit[0]].tree, []).append(unit)
    groups: list[list[int]] = []
    for units in by_tree.values():
        fitting: list[int] = []
        for unit in units:
            if fitting and _count_work(rows, [*fitting, *unit]) > max_tokens:
                groups.append(fitting)
                fitting = []
            fitting = [*fitting, *unit]
        groups.append(fitting)
    work = [_count_work(rows, group) for group in groups]
    planned = plan_microbatches(work, max_tokens=max_tokens)
    return [[number for index in indices for number in groups[index]] for indices in planned]


def plan_microbatches(lengths_B: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Divide rows into as few micro-batches as possible, of nearly equal size.

    Rows come by descending length, so that rows of one micro-batch need little padding. A row that
    is longer than ``max_tokens`` gets its own.
    """
    rows = sorted(range(len(lengths_B)), key=lambda row: (-lengths_B[row], row))
    fewest = len(_fill(rows, lengths_B, max_tokens))
    low, high = 1, max_tokens
    while low < high:  # the smallest capacity that needs no more micro-batches
        middle = (low + high) // 2
        if len(_fill(rows, lengths_B, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(rows, lengths_B, high)


def _fill(rows: Sequence[int], lengths_B: Sequence[int], capacity: int) -> list[list[int]]:
    microbatches: list[list[int]] = []
    num_tokens = 0
    for row in rows:
        if not microbatches or num_tokens + lengths_B[row] > capacity:
            microbatches.append([])
            num_tokens = 0
        microbatches[-1].append(row)
        num_tokens += lengths_B[row]
    return microbatches


def lay_out(rows: BatchRows, numbers: Sequence[int], batcher: MicroBatcher) -> MicroBatch:
    """Lay sequences end to end for this rank.

    Without rows the result is a dummy: one token that is not scored. With it a rank takes part in
    the collectives of ranks that have more micro-batches.
    """
    packed = _pack(rows, numbers, batcher) if numbers else _DUMMY
    num_tokens, num_scored = len(packed.index_T) if numbers else 0, len(packed.token_index_S)
    lengths_B = packed.row_S.bincount(minlength=len(rows.response_lengths_B))
    packed, num_missing, layout = _take_share(packed, batcher)
    experts_TJK = None
    if rows.experts_NJK is not None:
        experts_TJK = rows.experts_NJK[packed.index_T if numbers else packed.index_T[:0]]
        num_without = len(packed.index_T) + num_missing - len(experts_TJK)
        experts_TJK = pad(experts_TJK, (0, 0, 0, 0, 0, num_without), value=-1)
    device, positions_T, seen = batcher.device, packed.positions_T, None
    if rows.images is not None:
        positions_T = rows.images.position_3N[:, packed.index_T]
        seen = rows.images.seen(packed.index_T, device)
    tokens = PackedTokens(
        token_ids_T=pad(rows.token_ids_N[packed.index_T], (0, num_missing)).to(device),
        positions_T=pad(positions_T, (0, num_missing)).to(device),
        layout=layout,
        scored_S=packed.scored_S.to(device),
        targets_S=rows.token_ids_N[packed.token_index_S].to(device),
        num_padding=num_missing if numbers else len(packed.index_T) + num_missing,
        num_row_tokens=num_tokens,
        experts_TJK=experts_TJK,
        seen=seen,
        masks=None if rows.masks is None else rows.masks.at(packed.token_index_S),
        teacher=None if rows.teacher is None else rows.teacher[packed.token_index_S],
    )
    token_rows = TokenRows(
        packed.row_S.to(device),
        lengths_B.to(device),
        num_scored,
        gather=None if batcher.share is None else batcher.share.gather,
    )
    return MicroBatch(tokens, packed.token_index_S, token_rows, num_tokens)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A micro-batch on the host, without padding."""

    index_T: Tensor  # packed tokens among the flat values
    positions_T: Tensor
    segments: list[Segment]
    scored_S: Tensor  # packed tokens whose successor is scored
    token_index_S: Tensor
    row_S: Tensor


_ZERO_T = torch.zeros(1, dtype=torch.int64)
_NOTHING_S = torch.zeros(0, dtype=torch.int64)
_DUMMY = _Packed(
    index_T=_ZERO_T,
    positions_T=_ZERO_T,
    segments=[Segment(1)],
    scored_S=_NOTHING_S,
    token_index_S=_NOTHING_S,
    row_S=_NOTHING_S,
)


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive tokens of a sequence that are computed together."""

    number: int  # of the sequence
    skip: int  # tokens of the sequence before it, which other spans compute
    num_tokens: int


def _pack(rows: BatchRows, numbers: Sequence[int], batcher: MicroBatcher) -> _Packed:
    trees = rows.prefixes.trees(numbers, rows.by_number)
    spans = _arrange(rows, trees, by_length=batcher.kernel == "padded")
    lengths_K = torch.tensor([span.num_tokens for span in spans])
    ends_K = lengths_K.cumsum(0)
    begins_K = torch.tensor([rows.by_number[span.number].begin for span in spans])
    skips_K = torch.tensor([span.skip for span in spans])
    positions_T = (skips_K - (ends_K - lengths_K)).repeat_interleave(lengths_K)
    positions_T += torch.arange(len(positions_T))
    index_T = positions_T + begins_K.repeat_interleave(lengths_K)
    own = {
        (span.number, span.skip): range(end - span.num_tokens, end)
        for span, end in zip(spans, ends_K.tolist(), strict=True)
    }
    runs: dict[int, Runs] = {}
    for tree in trees:
        runs |= _runs_of(tree, own)
    numbers = [number for tree in trees for number in tree.members]
    # A shared token predicts a token of each of its sequences.
    at_F = tokens_of(runs[number] for number in numbers)
    sequences = [rows.by_number[number] for number in numbers]
    index_F = tokens_of((range(each.begin, each.begin + each.num_tokens),) for each in sequences)
    lengths_R = torch.tensor([each.num_tokens for each in sequences])
    row_F = torch.tensor([each.row for each in sequences]).repeat_interleave(lengths_R)
    is_scored_F = rows.is_response_N[index_F + 1]
    at_S, index_S, row_S = (each[is_scored_F] for each in (at_F, index_F, row_F))
    order_S = torch.where(index_T[at_S] == index_S, at_S, len(index_T)).argsort(stable=True)
    return _Packed(
        index_T=index_T,
        positions_T=positions_T,
        segments=[Segment(s.num_tokens, _first(runs[s.number], s.skip)) for s in spans],
        scored_S=at_S[order_S],
        token_index_S=index_S[order_S] + 1,
        row_S=row_S[order_S],
    )


def _arrange(rows: BatchRows, trees: Sequence[Tree], *, by_length: bool) -> list[_Span]:
    """Order the spans of a micro-batch.

    What all sequences of a tree share comes first and their rests last: tree by tree for the varlen
    kernel, by length for the padded kernel, to pad least.
    """
    by_tree: list[list[_Span]] = []
    for tree in trees:
        spans = [_Span(tree.members[0], 0, tree.num_shared)]
        for number in tree.members:
            skip, num_tokens = tree.branches[number], rows.by_number[number].num_tokens
            spans += [_Span(number, skip, num_tokens - skip)] * (skip < num_tokens)
        by_tree.append(spans)
    by_tree.sort(key=lambda spans: len(spans) == 1)
    first = [spans[0] for spans in by_tree]
    last = [span for spans in by_tree for span in spans[1:]]
    if by_length:
        first.sort(key=lambda span: -span.num_tokens)
        last.sort(key=lambda span: (-span.num_tokens, -span.skip))
    return [*first, *last]


def _runs_of(tree: Tree, own: dict[tuple[int, int], range]) -> dict[int, Runs]:
    """Return the packed tokens of each sequence of a tree."""
    runs: dict[int, Runs] = {}
    before: Runs = (own[tree.members[0], 0],)
    for number, num_shared in tree.branches.items():
        before = _first(before, num_shared)
        if (number, num_shared) in own:
            before = (*before, own[number, num_shared])
        runs[number] = before
    return runs


def _first(runs: Runs, num_tokens: int) -> Runs:
    kept = []
    for run in runs:
        kept.append(run[:num_tokens])
        num_tokens -= len(kept[-1])
    return tuple(run for run in kept if run)


def _take_share(packed: _Packed, batcher: MicroBatcher) -> tuple[_Packed, int, PackLayout]:
    """Return this rank's tokens, the number of padding tokens after them, and the layout."""
    share = batcher.share
    if share is not None and share.exchange is None:
        shared = split_for_context_parallel(
            packed.segments,
            share,
            multiple=batcher.multiple,
            kernel=batcher.kernel,
            device=batcher.device,
        )
        return _keep(packed, shared.own_U), shared.num_padding, shared.layout
    num_missing = -len(packed.index_T) % (batcher.multiple * (share.size if share else 1))
    # The varlen kernel takes segments with a prefix last: there padding becomes one of them.
    prefix = packed.segments[-1].prefix if batcher.kernel == "varlen" else ()
    segments = [*packed.segments, *[Segment(num_missing, prefix)] * bool(num_missing)]
    layout = build_layout(segments, kernel=batcher.kernel, device=batcher.device)
    if share is None:
        return packed, num_missing, layout
    shared = deal_out(len(packed.index_T), num_missing, layout, share)
    return _keep(packed, shared.own_U), shared.num_padding, shared.layout


def _keep(packed: _Packed, own_U: Tensor) -> _Packed:
    own_of_token_T = torch.full_like(packed.index_T, -1)
    own_of_token_T[own_U] = torch.arange(len(own_U))
    scored_S = own_of_token_T[packed.scored_S]
    is_own_S = scored_S >= 0
    return replace(
        packed,
        index_T=packed.index_T[own_U],
        positions_T=packed.positions_T[own_U],
        scored_S=scored_S[is_own_S],
        token_index_S=packed.token_index_S[is_own_S],
        row_S=packed.row_S[is_own_S],
    )


def _count_work(rows: BatchRows, numbers: Sequence[int]) -> int:
    """Count as tokens what a micro-batch of these sequences holds."""
    work = num_apart = 0
    for number, skip in rows.prefixes.branches(numbers).items():
        sequence = rows.by_number[number]
        work += sequence.num_tokens - skip
        num_apart += sequence.num_tokens - sequence.num_prompt_tokens * (not rows.has_states)
        if rows.patches_N is not None:
            end = sequence.begin + sequence.num_tokens
            work += int(rows.patches_N[sequence.begin + skip : end].sum())
    # Of a sampled token that sequences share, the head keeps a hidden state for each of them.
    return max(work, num_apart)


def _identify(prompt: slice, marked_N: Tensor, experts_NJK: Tensor | None) -> bytes:
    """Write down a prompt's tokens and images, and a digest of its experts: megabytes, maybe."""
    tokens = marked_N[prompt].numpy().tobytes()
    if experts_NJK is None:
        return tokens
    return tokens + blake2b(experts_NJK[prompt].numpy().tobytes(), digest_size=16).digest()
