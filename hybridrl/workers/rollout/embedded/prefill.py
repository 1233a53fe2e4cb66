"""Prompts run through the model once each, shortly before their responses get slots.

Legend as in ``kv_slots``: R prompts of one pass, L tokens of the longest, T tokens end to end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.workers.rollout.embedded.kv_slots import KVSlots, KVStep
from hybridrl.workers.rollout.embedded.model import Forward, require_finite

# Of one pass, with padding. Limits the memory of prompts that wait for a slot: 0.2 GB for a
# 7B model (57 kB of keys and values a token in bfloat16). The default task's 16 prompts fit in one.
_MAX_PASS_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts [begin, end) of a call: R = end - begin."""

    begin: int
    end: int
    kv_YRJLD: Tensor  # [Y, 2, R, J, L, D], keys and values; 0 past the end of a prompt
    logits_RV: Tensor  # of each response's first token


class PromptQueue:
    """The prompts of one call, in order."""

    def __init__(
        self, forward: Forward, slots: KVSlots, *, token_T: Tensor, offsets: list[int]
    ) -> None:
        """Take prompts; nothing runs yet.

        Args:
            forward: runs them.
            slots: their keys and values will be copied there; gives type and size.
            token_T: int64 [T], all prompts end to end, on the model's device.
            offsets: P + 1 indices into ``token_T``; prompt p is [offsets[p], offsets[p + 1]).
        """
        self._forward = forward
        self._slots = slots
        self._token_T = token_T
        self._offsets = offsets
        self._latest: Prefilled | None = None
        self.num_passes = 0

    def pass_with(self, prompt: int) -> Prefilled:
        """Return the pass that holds ``prompt``. Prompts are asked for in rising order.

        Raises:
            EngineError: a logit is not finite.
        """
        if self._latest is None or prompt >= self._latest.end:
            self._latest = self._run(prompt)
            self.num_passes += 1
        return self._latest

    def _run(self, begin: int) -> Prefilled:
        end, longest = self._plan(begin)
        token_T = self._token_T[self._offsets[begin] : self._offsets[end]]
        bounds = torch.tensor(self._offsets[begin : end + 1], device=token_T.device)
        bounds -= self._offsets[begin]
        row_T = torch.arange(end - begin, device=token_T.device).repeat_interleave(bounds.diff())
        position_T = torch.arange(len(token_T), device=token_T.device) - bounds[row_T]
        num_layers, _, _, num_kv_heads, _, head_dim = self._slots.kv_YSJCD.shape
        kv_YRJLD = self._slots.kv_YSJCD.new_zeros(
            num_layers, 2, end - begin, num_kv_heads, longest, head_dim
        )
        kv_step = KVStep(kv_YRJLD, position_T, row_T=row_T, longest=longest, mask_R11L=None)
        logits_RV = self._forward(token_T, kv_step, logits_at=bounds[1:] - 1)
        require_finite(logits_RV)
        return Prefilled(begin, end, kv_YRJLD, logits_RV)

    def _plan(self, begin: int) -> tuple[int, int]:
        """Return the end of a pass from ``begin`` on, at least one prompt, and its longest."""
        end, longest = begin, 0
        while end + 1 < len(self._offsets):
            longer = max(longest, self._offsets[end + 1] - self._offsets[end])
            if end > begin and (end + 1 - begin) * longer > _MAX_PASS_TOKENS:
                break
            end, longest = end + 1, longer
        return end, longest
