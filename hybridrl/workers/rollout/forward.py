"""One forward pass of a transformers model over packed tokens and ``KVSlots``."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.errors import EngineError
from hybridrl.workers.rollout.kv_slots import KVStep


def forward(
    model: PreTrainedModel, token_T: Tensor, kv_step: KVStep, *, logits_at: Tensor | None = None
) -> Tensor:
    """Run T tokens through the model, which reads and writes keys and values through ``kv_step``.

    Args:
        model: built with ``kv_slots.ATTENTION_NAME``.
        token_T: int64 [T].
        kv_step: rows and places of the tokens.
        logits_at: int64 [N], the tokens whose next-token logits are wanted; None: all.

    Returns:
        [N, V] in the model's type.
    """
    output = model(
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
