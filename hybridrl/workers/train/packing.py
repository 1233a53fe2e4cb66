"""From jagged batches to packs: rows laid end to end, with the places of their scored tokens.

Legend: B rows of the batch, L tokens of a row, K stretches of a pack, T packed tokens,
S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridrl.batch import response_lengths, row_lengths
from hybridrl.errors import DataError
from hybridrl.models.packed import AttentionKernel, PackLayout, Segment, build_layout
from hybridrl.models.packed_model import PackedTokens
from hybridrl.models.packed_share import ContextParallelRank, split_for_context_parallel
from hybridrl.workers.train.microbatch import plan_microbatches


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch, or this rank's share of one."""

    tokens: PackedTokens  # on the device
    place_S: Tensor  # int64, on the host: each scored token's place among the batch's flat values
    row_S: Tensor  # int64, on the host: the row b of each scored token
    num_tokens: int  # of rows, by all ranks that share the pack; 0 in a filler
    num_scored: int  # by all of them


@dataclass(frozen=True, slots=True)
class _Whole:
    """A pack, on the host, before it is shared or padded."""

    token_ids_T: Tensor
    positions_T: Tensor
    segments: list[Segment]
    scored_S: Tensor
    place_S: Tensor
    row_S: Tensor
    experts_TJK: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that has a response."""

    begin: int  # place of its first token among the flat values
    num_tokens: int  # tokens that are computed: all but the last
    num_prompt_tokens: int  # tokens before the first response token
    prompt: bytes  # equal for siblings


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive tokens of a row that are computed together."""

    row: int
    skip: int  # tokens of the row that come before, in a stretch shared by siblings
    num_tokens: int


class RowPacker:
    """Cuts one batch into packs.

    Not computed are: the last token of a row, which predicts nothing; a row without a response
    token, which teaches nothing; and the prompt of a row that a sibling in the same pack has
    computed already, unless ranks share the tokens of packs and attend with the varlen kernel.
    Gradients are those of the rows one by one.

    Where experts are given, a prompt is computed once only for siblings whose prompts went through
    the same: batched otherwise, an engine may have sent one of them elsewhere.

    Args:
        token_ids_BL: int64, jagged.
        response_mask_BL: bool, jagged.
        kernel: the attention that packs are laid out for.
        device: where the model computes.
        multiple: packs get as many tokens more, which belong to no row, as make them divisible: the
            shares of ranks, where they share tokens.
        share: this rank's part of each pack; None if it has all of it.
        routed_experts_BLJK: int16, jagged, the experts to go through; None leaves it to the model.

    Raises:
        DataError: a row begins with a response token, which no token predicts.
    """

    def __init__(
        self,
        token_ids_BL: Tensor,
        response_mask_BL: Tensor,
        *,
        kernel: AttentionKernel,
        device: torch.device,
        multiple: int = 1,
        share: ContextParallelRank | None = None,
        routed_experts_BLJK: Tensor | None = None,
    ) -> None:
        self._multiple = multiple
        self._share = share
        self._experts = None if routed_experts_BLJK is None else routed_experts_BLJK.values()
        self._token_ids = token_ids_BL.values()
        self._mask = response_mask_BL.values()
        self._kernel = kernel
        self._device = device
        self.response_lengths_B = response_lengths(response_mask_BL)  # int64
        self._rows = self._find_rows(row_lengths(token_ids_BL))

    def plan(self, max_tokens: int) -> list[list[int]]:
        """Return the rows of each pack of at most ``max_tokens`` tokens."""
        families = [
            part
            for family in self._families(self._rows)
            for part in self._cut_to_size(family, max_tokens)
        ]
        num_tokens = [self._num_tokens(family) for family in families]
        plan = plan_microbatches(num_tokens, max_tokens=max_tokens)
        return [[row for place in places for row in families[place]] for places in plan]

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Count the tokens of a pack of these rows."""
        return sum(self._num_tokens(family) for family in self._families(rows))

    def pack(self, rows: Sequence[int]) -> Pack:
        """Lay rows end to end. No rows give one token that is not scored.

        Such a filler keeps a rank in step with the collectives of ranks that have more packs.
        """
        whole = self._whole(rows) if rows else self._filler()
        mine, num_missing, layout = self._take_share(whole)
        experts_TJK = mine.experts_TJK
        if experts_TJK is not None:
            experts_TJK = _pad_rows(experts_TJK, num_missing)
        num_tokens = len(whole.token_ids_T) if rows else 0
        tokens = PackedTokens(
            token_ids_T=pad(mine.token_ids_T, (0, num_missing)).to(self._device),
            positions_T=pad(mine.positions_T, (0, num_missing)).to(self._device),
            layout=layout,
            scored_S=mine.scored_S.to(self._device),
            targets_S=self._token_ids[mine.place_S].to(self._device),
            num_padding=num_missing if rows else len(mine.token_ids_T) + num_missing,
            num_pack_tokens=num_tokens,
            experts_TJK=experts_TJK,
        )
        return Pack(tokens, mine.place_S, mine.row_S, num_tokens, len(whole.place_S))

    def _take_share(self, whole: _Whole) -> tuple[_Whole, int, PackLayout]:
        """Return what this rank computes of a pack, the padding that follows, and the layout."""
        if self._share is None:
            num_missing = -len(whole.token_ids_T) % self._multiple
            segments = [*whole.segments, *[Segment(num_missing)] * bool(num_missing)]
            layout = build_layout(segments, kernel=self._kernel, device=self._device)
            return whole, num_missing, layout
        shared = split_for_context_parallel(
            whole.segments,
            self._share,
            multiple=self._multiple,
            kernel=self._kernel,
            device=self._device,
        )
        own_U = shared.own_U
        own_of_token_T = torch.full_like(whole.positions_T, -1)
        own_of_token_T[own_U] = torch.arange(len(own_U))
        scored_S = own_of_token_T[whole.scored_S]
        is_own_S = scored_S >= 0
        mine = _Whole(
            token_ids_T=whole.token_ids_T[own_U],
            positions_T=whole.positions_T[own_U],
            segments=whole.segments,
            scored_S=scored_S[is_own_S],
            place_S=whole.place_S[is_own_S],
            row_S=whole.row_S[is_own_S],
            experts_TJK=None if whole.experts_TJK is None else whole.experts_TJK[own_U],
        )
        return mine, shared.num_padding, shared.layout

    def _whole(self, rows: Sequence[int]) -> _Whole:
        """Lay rows end to end."""
        spans, prefixes = self._lay_out(rows)
        lengths_K = torch.tensor([stretch.num_tokens for stretch in spans])
        ends_K = lengths_K.cumsum(0)
        within_T = torch.arange(int(ends_K[-1])) - _spread(ends_K - lengths_K, lengths_K)
        positions_T = within_T + _spread([stretch.skip for stretch in spans], lengths_K)
        row_T = _spread([stretch.row for stretch in spans], lengths_K)
        place_T = positions_T + _spread([self._rows[s.row].begin for s in spans], lengths_K)
        own_S = self._mask[place_T + 1].nonzero()[:, 0]
        shared_S, shared_row_S, shared_place_S = self._score_by_shared(rows, spans, ends_K)
        place_S = torch.cat([place_T[own_S] + 1, shared_place_S])
        segments = [Segment(s.num_tokens, p) for s, p in zip(spans, prefixes, strict=True)]
        return _Whole(
            token_ids_T=self._token_ids[place_T],
            positions_T=positions_T,
            segments=segments,
            scored_S=torch.cat([own_S, shared_S]),
            place_S=place_S,
            row_S=torch.cat([row_T[own_S], shared_row_S]),
            experts_TJK=self._experts_at(place_T),
        )

    def _find_rows(self, lengths_B: Tensor) -> dict[int, _Row]:
        """Describe the rows that have a response, by their numbers."""
        begins_B = lengths_B.cumsum(0) - lengths_B
        kept_R = self.response_lengths_B.nonzero()[:, 0]
        ordinals_B = self.response_lengths_B.cumsum(0) - self.response_lengths_B
        first_R = self._mask.nonzero()[:, 0][ordinals_B[kept_R]]
        columns_R = (kept_R, begins_B[kept_R], lengths_B[kept_R], first_R)
        rows = {}
        for row, begin, length, first in zip(*(c.tolist() for c in columns_R), strict=True):
            if first == begin:
                raise DataError(
                    f"row {row} of the batch begins with a response token, which nothing predicts; "
                    "give every row a prompt of at least one token"
                )
            prompt = self._token_ids[begin:first].numpy().tobytes()
            if self._experts is not None:
                prompt += _digest(self._experts[begin:first])
            rows[row] = _Row(begin, length - 1, first - begin, prompt)
        return rows

    def _families(self, rows: Iterable[int]) -> list[list[int]]:
        """Group rows that share a prompt, where the kernel can make use of it."""
        if self._kernel == "varlen" and self._share is not None:
            return [[row] for row in rows]
        families: dict[bytes, list[int]] = {}
        for row in rows:
            families.setdefault(self._rows[row].prompt, []).append(row)
        return list(families.values())

    def _cut_to_size(self, family: list[int], max_tokens: int) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        for row in family:
            if parts[-1] and self._num_tokens([*parts[-1], row]) > max_tokens:
                parts.append([])
            parts[-1].append(row)
        return parts

    def _num_tokens(self, family: Sequence[int]) -> int:
        num_shared_tokens = self._rows[family[0]].num_prompt_tokens * (len(family) - 1)
        return sum(self._rows[row].num_tokens for row in family) - num_shared_tokens

    def _lay_out(self, rows: Sequence[int]) -> tuple[list[_Stretch], list[int | None]]:
        """Return the pack's stretches, and the number of each one's prefix.

        Prompts that siblings share come first and what follows them last, family by family, as the
        varlen kernel takes them; for the padded kernel, which pads least so, by length.
        """
        families = [self._stretches_of(family) for family in self._families(rows)]
        families.sort(key=lambda family: not family[1])
        whole = [stretch for stretch, _ in families]
        tails = [tail for _, following in families for tail in following]
        if self._kernel == "padded":
            whole.sort(key=lambda stretch: -stretch.num_tokens)
            tails.sort(key=lambda stretch: (-stretch.num_tokens, -stretch.skip))
        number_of = {self._rows[s.row].prompt: number for number, s in enumerate(whole)}
        return [*whole, *tails], [None] * len(whole) + [
            number_of[self._rows[stretch.row].prompt] for stretch in tails
        ]

    def _stretches_of(self, family: Sequence[int]) -> tuple[_Stretch, list[_Stretch]]:
        """Return a row, or the prompt that a family shares, and what follows it in each row."""
        first = self._rows[family[0]]
        if len(family) == 1:
            return _Stretch(family[0], 0, first.num_tokens), []
        skip = first.num_prompt_tokens
        following = [_Stretch(row, skip, self._rows[row].num_tokens - skip) for row in family]
        return _Stretch(family[0], 0, skip), [tail for tail in following if tail.num_tokens]

    def _score_by_shared(
        self, rows: Sequence[int], spans: Sequence[_Stretch], ends_K: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score siblings' first response tokens by the end of the prompt they share, all [S].

        Returns packed token, row, and place of the response token among the flat values.
        """
        end_of = {s.row: int(end) for s, end in zip(spans, ends_K, strict=True) if not s.skip}
        scored = []
        for family in self._families(rows):
            for row in family[1:]:
                place = self._rows[row].begin + self._rows[row].num_prompt_tokens
                scored.append((end_of[family[0]] - 1, row, place))
        shared_S, row_S, place_S = torch.tensor(scored, dtype=torch.int64).reshape(-1, 3).T
        return shared_S, row_S, place_S

    def _filler(self) -> _Whole:
        one_T, nothing_S = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        experts_TJK = self._experts_at(nothing_S)
        if experts_TJK is not None:
            experts_TJK = _pad_rows(experts_TJK, 1)
        return _Whole(one_T, one_T, [Segment(1)], nothing_S, nothing_S, nothing_S, experts_TJK)

    def _experts_at(self, place_T: Tensor) -> Tensor | None:
        """Return the experts of the tokens at places among the flat values."""
        return None if self._experts is None else self._experts[place_T]


def _pad_rows(experts_TJK: Tensor, num_padding: int) -> Tensor:
    """Let padding that follows have no experts: -1."""
    return pad(experts_TJK, (0, 0, 0, 0, 0, num_padding), value=-1)


def _digest(experts_LJK: Tensor) -> bytes:
    """Tell routes apart in 16 bytes: those of a prompt may take a megabyte."""
    return blake2b(experts_LJK.numpy().tobytes(), digest_size=16).digest()


def _spread(values_K: Tensor | list[int], lengths_K: Tensor) -> Tensor:
    """Give each packed token [T] the value of its stretch [K]."""
    return torch.as_tensor(values_K).repeat_interleave(lengths_K)
