"""The static KV cache of the embedded engine, and attention over it.

Legend: Y layers, S slots (rows of the cache), R rows in use, H query heads, J key-value heads, G =
H / J, D size of a head, C context tokens of a slot, L the longest length in use, T tokens of a
forward pass, end to end: the model always sees one row of T tokens, and only attention is padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "hybridrl_kv_slots"


class KVStep:
    """Where one forward pass puts its keys and values, and what its queries may look at.

    Two kinds: *prefill* (``mask`` is None) runs whole prompts, which see themselves alone; *decode*
    runs one token for each of rows 0 .. R-1 over what these rows have cached.
    """

    def __init__(
        self, kv_YRJLD: Tensor, row_T: Tensor, position_T: Tensor, *, mask_R11L: Tensor | None
    ) -> None:
        """Describe one forward pass.

        Args:
            kv_YRJLD: [Y, 2, R, J, L, D], keys and values; written at the tokens' places.
            row_T: int64 [T], row of each token. In decode T = R and this counts up from 0.
            position_T: int64 [T], place of each token in its row.
            mask_R11L: float [R, 1, 1, L], added to the scores; None: causal, from place 0.
        """
        self._layers = [tuple(layer.unbind(0)) for layer in kv_YRJLD.unbind(0)]
        self._row_T = row_T
        self.position_T = position_T
        self._mask_R11L = mask_R11L

    def attend(
        self,
        layer: int,
        query_1HTD: Tensor,
        new_keys_and_values: tuple[Tensor, Tensor],
        *,
        scale: float,
    ) -> Tensor:
        """Store new keys and values [1, J, T, D] each, and attend: [1, T, H, D]."""
        row_T, position_T = self._row_T, self.position_T
        for cache_RJLD, new_1JTD in zip(self._layers[layer], new_keys_and_values, strict=True):
            cache_RJLD[row_T, :, position_T] = new_1JTD[0].transpose(0, 1)
        keys_RJLD, values_RJLD = self._layers[layer]
        num_rows, num_kv_heads, longest, head_dim = keys_RJLD.shape
        query_THD = query_1HTD[0].transpose(0, 1)
        if self._mask_R11L is not None:
            # Query heads that share keys look like several queries of one head: no repeated keys.
            out_RJGD = F.scaled_dot_product_attention(
                query_THD.reshape(num_rows, num_kv_heads, -1, head_dim),
                keys_RJLD,
                values_RJLD,
                attn_mask=self._mask_R11L,
                scale=scale,
            )
            return out_RJGD.reshape(1, num_rows, -1, head_dim)
        query_RHLD = query_THD.new_zeros(num_rows, query_THD.shape[1], longest, head_dim)
        query_RHLD[row_T, :, position_T] = query_THD
        out_RHLD = F.scaled_dot_product_attention(
            query_RHLD, keys_RJLD, values_RJLD, is_causal=True, scale=scale, enable_gqa=True
        )
        return out_RHLD[row_T, :, position_T][None]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv_step: KVStep,
    **_unused: object,
) -> tuple[Tensor, None]:
    # The signature is transformers'; `kv_step` came through the keyword arguments of model(...).
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv_step.attend(layer, query, (key, value), scale=scaling), None


# No mask function goes with it: transformers then makes no mask, and hands `None` down.
AttentionInterface.register(ATTENTION_NAME, _attend)


class KVSlots:
    """S rows of keys and values; who uses which row is for the caller to know.

    Every value is finite at all times: a masked place has weight 0, and 0 * NaN would be NaN.
    """

    def __init__(self, kv_YSJCD: Tensor) -> None:
        """Wrap the memory: [Y, 2, S, J, C, D], zeroed."""
        self.kv_YSJCD = kv_YSJCD
        self.num_slots = kv_YSJCD.shape[2]
        self.max_tokens = kv_YSJCD.shape[4]
        device = kv_YSJCD.device
        self._slot_S = torch.arange(self.num_slots, device=device)
        self._place_C = torch.arange(self.max_tokens, device=device)

    def decode_step(self, length_R: Tensor, longest: int) -> KVStep:
        """Prepare one token for each of the first R rows.

        Args:
            length_R: int64 [R], tokens cached so far, which is the place of the new one.
            longest: largest length after this step; attention reads no further.
        """
        num_rows = len(length_R)
        is_later_RL = self._place_C[:longest] > length_R[:, None]
        mask_RL = torch.zeros(num_rows, longest, dtype=self.kv_YSJCD.dtype, device=length_R.device)
        mask_RL.masked_fill_(is_later_RL, float("-inf"))
        return KVStep(
            self.kv_YSJCD[:, :, :num_rows, :, :longest],
            self._slot_S[:num_rows],
            length_R,
            mask_R11L=mask_RL[:, None, None],
        )

    def place(self, first_row: int, kv_YRJLD: Tensor, row_N: Tensor) -> None:
        """Copy rows ``row_N`` of prefilled [Y, 2, R, J, L, D] to N slots from ``first_row`` on."""
        last_row, longest = first_row + len(row_N), kv_YRJLD.shape[4]
        self.kv_YSJCD[:, :, first_row:last_row, :, :longest] = kv_YRJLD[:, :, row_N]

    def move(self, from_N: Tensor, to_N: Tensor, longest: int) -> None:
        """Copy rows ``from_N`` over rows ``to_N``, int64 [N], up to ``longest`` tokens."""
        used = self.kv_YSJCD[:, :, :, :, :longest]
        used[:, :, to_N] = used[:, :, from_N]
