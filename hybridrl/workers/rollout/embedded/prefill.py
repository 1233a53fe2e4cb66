"""Contexts run through the model once each, but for beginnings that free slots still hold.

Legend as in ``kv_slots``: R contexts of one pass, L tokens of the longest, T new tokens end to end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.batch import jagged
from hybridrl.images import Images, ImageSettings
from hybridrl.models.seeing import RowImages
from hybridrl.workers.rollout.embedded.kv_slots import KVSlots, KVStep, Sight
from hybridrl.workers.rollout.embedded.model import Forward, require_finite
from hybridrl.workers.rollout.embedded.row_states import States


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first tokens of a context, whose keys and values lie in a slot."""

    slot: int
    num_tokens: int


class KeptPrefixes:
    """Knows which free slots hold keys and values that a later context may begin with."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._tokens: dict[int, tuple[int | None, bytes]] = {}
        """By slot: the version of the adapter that wrote them, and token ids, int64."""
        self._continued: set[int] = set()
        """Slots whose conversation continues in another slot."""

    def keep(self, slot: int, version: int | None, tokens: bytes) -> None:
        """Note that a free slot holds the keys and values of these tokens, of this adapter."""
        self._tokens[slot] = version, tokens
        self._continued.discard(slot)

    def find(self, version: int | None, context: bytes) -> CachedPrefix | None:
        """Return the longest beginning of a context that a slot holds; None: no slot does.

        Its slot is the first to be overwritten from now on.
        """
        lengths = [
            (len(tokens), slot)
            for slot, (of, tokens) in self._tokens.items()
            if of == version and context.startswith(tokens) and len(tokens) < len(context)
        ]
        if not lengths:
            return None
        num_bytes, slot = max(lengths)
        self._continued.add(slot)
        return CachedPrefix(slot, num_bytes // torch.int64.itemsize)

    def give_up(self, first_slot: int, end_slot: int) -> list[tuple[int, int, int]]:
        """Forget slots that responses take, and keep in other free slots what these held.

        ``end_slot`` is the first behind them; it and all that follow are free. Returns moves to do
        at once: from slot, to slot, number of tokens. A slot is in one of them.
        """
        taken = range(first_slot, end_slot)
        tokens = {slot: self._tokens.pop(slot) for slot in taken if slot in self._tokens}
        needed = [slot for slot in tokens if slot not in self._continued]
        self._continued.difference_update(taken)
        if not needed:
            return []
        usable = [
            slot
            for slot in range(end_slot, self._num_slots)
            if slot not in self._tokens or slot in self._continued
        ]
        moves = list(zip(needed, usable, strict=False))
        for old, new in moves:
            self.keep(new, *tokens[old])
        return [(old, new, len(tokens[old][1]) // torch.int64.itemsize) for old, new in moves]


# Of one pass, with padding. Limits the memory of contexts that wait for a slot: 0.2 GB for a
# 7B model (57 kB of keys and values a token in bfloat16). The default task's 16 prompts fit in one.
_MAX_PASS_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Prefilled:
    """R different contexts."""

    kv_YRJLD: Tensor  # [Y, 2, R, J, L, D], keys and values; finite past the end of a context
    logits_RV: Tensor  # of each response's first token
    states: States  # of recurrent layers


def plan_pass(contexts: Iterable[tuple[Hashable, int]]) -> list[int]:
    """Choose the first contexts for one pass, at least one; return the row of each.

    Equal contexts share a row. They come as what distinguishes them, and number of tokens.
    """
    rows: list[int] = []
    row_of: dict[Hashable, int] = {}
    longest = 0
    for context, length in contexts:
        if context not in row_of:
            longer = max(longest, length)
            if row_of and (len(row_of) + 1) * longer > _MAX_PASS_TOKENS:
                break
            row_of[context], longest = len(row_of), longer
        rows.append(row_of[context])
    return rows


def prefill(
    forward: Forward,
    slots: KVSlots,
    contexts: Sequence[tuple[Tensor, Images]],
    prefixes: Sequence[CachedPrefix | None],
    *,
    logits_at: Tensor | None = None,
) -> Prefilled:
    """Run contexts, int64 [L] with images, through the model, but for prefixes that slots hold.

    A prefix is shorter than its context; None: no slot holds any. ``logits_at`` are tokens, int64,
    of the one context; None: the last of each.
    """
    device = slots.kv_YSJCD.device
    num_layers, _, _, num_kv_heads, _, head_dim = slots.kv_YSJCD.shape
    longest = max(len(context) for context, _ in contexts)
    kv_YRJLD = slots.kv_YSJCD.new_zeros(
        num_layers, 2, len(contexts), num_kv_heads, longest, head_dim
    )
    num_cached = [0 if prefix is None else prefix.num_tokens for prefix in prefixes]
    for row, prefix in enumerate(prefixes):
        if prefix is not None:
            cached = slots.kv_YSJCD[:, :, prefix.slot, :, : prefix.num_tokens]
            kv_YRJLD[:, :, row, :, : prefix.num_tokens] = cached
    new = [context[begin:] for (context, _), begin in zip(contexts, num_cached, strict=True)]
    token_T = torch.cat(new).to(device)
    count_R = torch.tensor([len(tokens) for tokens in new], device=device)
    end_R = count_R.cumsum(0)
    row_T = torch.arange(len(new), device=device).repeat_interleave(count_R)
    query_T = torch.arange(len(token_T), device=device) - (end_R - count_R)[row_T]
    cached_R = torch.tensor(num_cached, device=device)
    kv_step = KVStep(
        kv_YRJLD,
        query_T + cached_R[row_T],
        row_T=row_T,
        longest=longest,
        mask_R11L=None,
        states=slots.states,
        cached_R=cached_R if any(num_cached) else None,
    )
    if slots.images is not None:
        kv_step.sight = _see(contexts, num_cached, slots.images, device)
    at_R = end_R - 1 if logits_at is None else logits_at.to(device)
    logits_RV = forward(token_T, kv_step, logits_at=at_R)
    require_finite(logits_RV)
    return Prefilled(kv_YRJLD, logits_RV, slots.states.of(kv_step.cache))


def _see(
    contexts: Sequence[tuple[Tensor, Images]],
    num_cached: Sequence[int],
    settings: ImageSettings,
    device: torch.device,
) -> Sight:
    """Return the positions of new tokens, and the images among them, if any."""
    rows = RowImages.of(
        jagged([tokens for tokens, _ in contexts]), [images for _, images in contexts], settings
    )
    lengths_R = torch.tensor([len(tokens) for tokens, _ in contexts])
    place_N = torch.arange(int(lengths_R.sum()))
    first_new_R = lengths_R.cumsum(0) - lengths_R + torch.tensor(num_cached)
    index_T = place_N[place_N >= first_new_R.repeat_interleave(lengths_R)]
    has_images = bool((rows.image_N[index_T] >= 0).any())
    seen = rows.seen(index_T, device) if has_images else None
    return Sight(rows.position_3N[:, index_T].to(device), seen)
