"""The static KV cache of the embedded engine, and attention over it.

Legend: Y layers, S slots (rows of the cache), R rows in use, H query heads, J key-value heads, G =
H / J, D size of a head, C context tokens of a slot, L the longest length in use, T tokens of a
forward pass, end to end: the model always sees one row of T tokens, and only attention is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hybridrl.images import ImageSettings
from hybridrl.models.packed_attention import with_sink
from hybridrl.models.recurrent import Mix
from hybridrl.models.seeing import SeenImages
from hybridrl.models.varlen import as_wide_as_keys
from hybridrl.workers.rollout.embedded.row_states import RowStates, States, mix_contexts

ATTENTION_NAME = "hybridrl_kv_slots"


@dataclass(frozen=True, slots=True)
class Sight:
    """Positions and images of a pass, for a model that sees."""

    position_T: Tensor
    """int64 [T], or [3, T] with rows and columns of images; not where keys are written."""

    seen: SeenImages | None
    """None: all tokens are words."""


class KVStep:
    """Targets of one forward pass's keys and values, and the range that its queries attend to.

    Two kinds: *prefill* (``mask_R11L`` is None) runs contexts, which attend to themselves and to
    what is cached of them; *decode* runs one token for each of rows 0 .. R-1 over the cached tokens
    of these rows.

    Args:
        kv_YSJCD: [Y, 2, S, J, C, D], keys and values; written at the tokens' positions.
        position_T: int64, position of each token in its row.
        row_T: int64, row of each token. In decode T = R and this counts up from 0.
        longest: L, positions that are read, from 0.
        mask_R11L: float, added to the scores; None: causal.
        states: of the recurrent layers.
        cached_R: int64, prefill only: tokens of each row that are cached already; its new
            tokens follow them. None: no row has any.
    """

    sight: Sight | None = None  # for a model that sees; others get none

    def __init__(
        self,
        kv_YSJCD: Tensor,
        position_T: Tensor,
        *,
        row_T: Tensor,
        longest: int,
        mask_R11L: Tensor | None,
        states: RowStates,
        cached_R: Tensor | None = None,
    ) -> None:
        _, _, num_rows, num_kv_heads, num_places, head_dim = kv_YSJCD.shape
        num_used = num_rows if mask_R11L is None else len(mask_R11L)
        self._written = kv_YSJCD.view(len(kv_YSJCD), -1, head_dim).unbind(0)
        used = kv_YSJCD[:, :, :num_used, :, :longest]
        self._read = list(zip(used[:, 0].unbind(0), used[:, 1].unbind(0), strict=True))
        self._row_T = row_T
        self.position_T = position_T
        self._mask_R11L = mask_R11L
        self._cached_R = cached_R
        first_T = row_T * (num_kv_heads * num_places) + position_T
        line_2J = torch.arange(2 * num_kv_heads, device=position_T.device)
        line_2J[num_kv_heads:] += (num_rows - 1) * num_kv_heads
        self._place = (first_T[:, None] + line_2J * num_places).flatten()
        self._is_multiplied = (
            mask_R11L is not None and kv_YSJCD.is_cpu and kv_YSJCD.dtype is torch.float32
        )
        self._longest = longest
        self._num_kv_heads = num_kv_heads
        self._masks: dict[int | None, Tensor | None] = {}
        self.kv_layer = states.kv_layer
        self.cache = states.empty() if mask_R11L is None else states.of_rows(num_used)
        """States that recurrent layers read and leave."""

    def mix(self, mix: Mix, hidden_TH: Tensor) -> Tensor:
        """See ``RowsOfTokens``. No context of a recurrent model is cached before its prefill."""
        if self._mask_R11L is None:
            return mix_contexts(mix, hidden_TH, self.cache, self._row_T, self.position_T)
        return mix(hidden_states=hidden_TH[:, None], cache_params=self.cache)[:, 0]

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        new_keys_and_values: tuple[Tensor, Tensor],
        *,
        scale: float | None = None,
        window: int | None = None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Store new keys and values, [T, J, D] each, and attend; returns float [T, H * D].

        ``window`` is the number of newest tokens that a token sees, itself among them; None: all.
        A ``scale`` of None is ``1 / sqrt(D)``. A sink is a score of each head that takes its share
        of the attention, of a value of 0.
        """
        head_dim = query_THD.shape[-1]
        stored = torch.cat(new_keys_and_values, dim=1).view(-1, head_dim)
        self._written[layer].index_copy_(0, self._place, stored)
        scale = head_dim**-0.5 if scale is None else scale
        mask = self._mask(window)
        if mask is None or self._mask_R11L is None:
            return self._attend_to_prompts(layer, query_THD, scale, mask, sink_H)
        if self._is_multiplied:
            return self._attend_by_products(layer, query_THD, scale, mask, sink_H)
        keys_RJLD, values_RJLD = self._read[layer]
        num_rows, num_kv_heads, _, _ = keys_RJLD.shape
        # Query heads that share keys look like several queries of one head: no repeated keys.
        query_RJGD = query_THD.reshape(num_rows, num_kv_heads, -1, head_dim)
        if sink_H is not None:
            query_RJGD, keys_RJLD, values_RJLD, mask = with_sink(
                query_RJGD, keys_RJLD, values_RJLD, mask, sink_H.view(num_kv_heads, -1, 1) / scale
            )
        out_RJGD = F.scaled_dot_product_attention(
            query_RJGD, keys_RJLD, values_RJLD, attn_mask=mask, scale=scale
        )
        return out_RJGD[..., :head_dim].reshape(num_rows, -1)

    def _mask(self, window: int | None) -> Tensor | None:
        """Return the tensor that is added to the scores; layers with equal windows share it."""
        window = None if window is None or window >= self._longest else window
        if window not in self._masks:
            self._masks[window] = self._windowed_mask(window)
        return self._masks[window]

    def _windowed_mask(self, window: int | None) -> Tensor | None:
        """Return ``[L, L]`` for prompts, ``[R, 1, 1, L]`` for a decode step, or that per head.

        Behind cached tokens: ``[R, 1, Q, L]`` for Q queries.
        """
        mask = self._mask_R11L
        if self._cached_R is not None:
            column_L = torch.arange(self._longest, device=self.position_T.device)
            num_queries = int((self.position_T - self._cached_R[self._row_T]).max()) + 1
            position_RQ1 = (self._cached_R[:, None] + column_L[:num_queries])[..., None]
            is_seen_RQL = column_L <= position_RQ1
            if window is not None:
                is_seen_RQL &= column_L > position_RQ1 - window
            return is_seen_RQL[:, None]
        if window is not None:
            column_L = torch.arange(self._longest, device=self.position_T.device)
            if mask is None:
                distance_LL = column_L[:, None] - column_L
                return (distance_LL >= 0) & (distance_LL < window)
            # An unused row may have any position; it must see a key, or NaN would be cached.
            newest_R1 = self.position_T.clamp(max=self._longest - 1)[:, None]
            is_old_RL = column_L <= newest_R1 - window
            mask = mask.masked_fill(is_old_RL[:, None, None], float("-inf"))
        if mask is None or not self._is_multiplied:
            return mask
        mask_RJ1L = mask.expand(-1, self._num_kv_heads, -1, -1)
        return mask_RJ1L.reshape(-1, 1, self._longest)

    def _attend_by_products(
        self, layer: int, query_RHD: Tensor, scale: float, mask_X1L: Tensor, sink_H: Tensor | None
    ) -> Tensor:
        """Attend in decode by two batches of matrix products.

        With one token a row the CPU's flash kernel takes 1.4 to 2 times as long.
        """
        keys_XLD, values_XLD = (states.flatten(0, 1) for states in self._read[layer])
        query_XGD = query_RHD.reshape(len(keys_XLD), -1, query_RHD.shape[-1])
        scores_XGL = torch.baddbmm(mask_X1L, query_XGD, keys_XLD.mT, alpha=scale)
        if sink_H is None:
            shares_XGL = scores_XGL.softmax(-1)
        else:
            sink_XG1 = sink_H.expand(len(query_RHD), -1).reshape(*query_XGD.shape[:2], 1)
            shares_XGL = torch.cat([sink_XG1, scores_XGL], dim=-1).softmax(-1)[..., 1:]
        return torch.bmm(shares_XGL, values_XLD).view(len(query_RHD), -1)

    def _attend_to_prompts(
        self,
        layer: int,
        query_THD: Tensor,
        scale: float,
        mask: Tensor | None,
        sink_H: Tensor | None,
    ) -> Tensor:
        keys_RJLD, values_RJLD = self._read[layer]
        num_rows, _, longest, head_dim = keys_RJLD.shape
        query_T, num_queries = self.position_T, longest
        if self._cached_R is not None and mask is not None:
            query_T, num_queries = query_T - self._cached_R[self._row_T], mask.shape[2]
        at = (self._row_T, slice(None), query_T)
        query_RHQD = query_THD.new_zeros(num_rows, query_THD.shape[1], num_queries, head_dim)
        query_RHQD[at] = query_THD
        if sink_H is not None:
            query_RHQD, keys_RJLD, values_RJLD, mask = with_sink(
                query_RHQD, keys_RJLD, values_RJLD, mask, sink_H[:, None, None] / scale
            )
        out_RHQD = F.scaled_dot_product_attention(
            query_RHQD,
            keys_RJLD,
            values_RJLD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out_RHQD[at][..., :head_dim].flatten(1)


def _attend(  # noqa: PLR0913 - transformers chooses these
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv_step: KVStep,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    # The signature is transformers'; `kv_step` came through the keyword arguments of model(...).
    layer = kv_step.kv_layer[module.layer_idx]  # type: ignore[index]
    query_THD, key_TJD, value_TJE = (states[0].transpose(0, 1) for states in (query, key, value))
    new = (key_TJD, as_wide_as_keys(value_TJE, key_TJD))
    out_TX = kv_step.attend(
        layer, query_THD, new, scale=scaling, window=sliding_window, sink_H=s_aux
    )
    return out_TX.view(1, *query_THD.shape)[..., : value_TJE.shape[-1]], None


# No mask function belongs to it: transformers then makes no mask, and passes `None` down.
AttentionInterface.register(ATTENTION_NAME, _attend)


class KVSlots:
    """S rows of keys and values, [Y, 2, S, J, C, D], with the states of recurrent layers.

    Every value is finite at all times: a masked position has weight 0, and 0 * NaN would be NaN.
    """

    def __init__(
        self, kv_YSJCD: Tensor, states: RowStates, images: ImageSettings | None = None
    ) -> None:
        self.kv_YSJCD = kv_YSJCD
        self.images = images  # how the model cuts images; None: it sees none
        self.states = states
        self.num_slots = kv_YSJCD.shape[2]
        self.max_tokens = kv_YSJCD.shape[4]
        device = kv_YSJCD.device
        self._slot_S = torch.arange(self.num_slots, device=device)
        self._place_C = torch.arange(self.max_tokens, device=device)
        self._zero, self._minus_infinity = kv_YSJCD.new_tensor([0.0, float("-inf")]).unbind()

    def decode_step(self, length_R: Tensor, longest: int, shift_R: Tensor | None = None) -> KVStep:
        """Prepare one token for each of the first R rows.

        ``length_R``, int64, are tokens cached so far, which is the position of the new one. After
        the step ``longest`` is the largest; attention reads no further. ``shift_R``, int64, is what
        a row's images add to the positions of words behind them.
        """
        is_later_RL = self._place_C[:longest] > length_R[:, None]
        mask_RL = torch.where(is_later_RL, self._minus_infinity, self._zero)
        step = KVStep(
            self.kv_YSJCD,
            length_R,
            row_T=self._slot_S[: len(length_R)],
            longest=longest,
            mask_R11L=mask_RL[:, None, None],
            states=self.states,
        )
        if shift_R is not None:
            step.sight = Sight(length_R + shift_R, None)
        return step

    def place(self, first_row: int, kv_YRJLD: Tensor, states: States, row_N: Tensor) -> None:
        """Copy rows ``row_N`` of prefilled [Y, 2, R, J, L, D] to N slots from ``first_row`` on."""
        self.states.place(first_row, states, row_N)
        last_row, longest = first_row + len(row_N), kv_YRJLD.shape[4]
        placed = self.kv_YSJCD[:, :, first_row:last_row, :, :longest]
        if not placed.is_cpu:
            placed.copy_(kv_YRJLD[:, :, row_N])
            return
        for slot, row in enumerate(row_N.tolist()):  # row by row, as in `move`
            placed[:, :, slot] = kv_YRJLD[:, :, row]

    def move(self, from_N: Tensor, to_N: Tensor, longest: int) -> None:
        """Copy rows ``from_N`` over rows ``to_N``, int64 [N], up to ``longest`` tokens.

        A row may be in both: all are read before any is written.
        """
        self.states.move(from_N, to_N)
        used = self.kv_YSJCD[:, :, :, :, :longest]
        if not used.is_cpu:
            used[:, :, to_N] = used[:, :, from_N]
            return
        # A copy of a row is a copy of memory; indices take 3 times as long on a CPU.
        rows = [used[:, :, row].clone() for row in from_N.tolist()]
        for slot, row in zip(to_N.tolist(), rows, strict=True):
            used[:, :, slot] = row
