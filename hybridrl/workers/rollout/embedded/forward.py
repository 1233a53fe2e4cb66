"""One forward pass of a causal model over packed tokens and ``KVSlots``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.embedded.kv_slots import KVStep


class Forward(Protocol):
    """Runs T tokens through a model, which reads and writes keys and values through ``kv_step``."""

    def __call__(
        self, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run a pass.

        Args:
            token_T: int64 [T].
            kv_step: rows and places of the tokens.
            logits_at: int64 [N], the tokens whose next-token logits are wanted; None: all.

        Returns:
            [N, V] in the model's type.
        """
        ...


@dataclass(frozen=True, slots=True)
class TransformersForward:
    """The model's own pass, for any architecture."""

    model: PreTrainedModel
    """Built with ``kv_slots.ATTENTION_NAME``."""

    def __call__(
        self, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
    ) -> Tensor:
        """Run a pass; see ``Forward``."""
        output = self.model(
            input_ids=token_T[None],
            position_ids=kv_step.position_T[None],
            use_cache=False,
            kv_step=kv_step,
            logits_to_keep=0 if logits_at is None else logits_at,
        )
        logits_NV: Tensor = output.logits[0]
        return logits_NV


def require_finite(values: Tensor) -> None:
    """Raise EngineError if a logit or log-prob, of any shape, is infinite or NaN."""
    if not bool(values.isfinite().all()):
        raise EngineError(
            "the rollout model's logits are not finite: its weights were never sent, were lost in "
            "a release, or have diverged; sync weights before generate, and lower "
            "actor.optimizer.lr if they were synced"
        )
