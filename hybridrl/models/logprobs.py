"""Log-probs and entropies of given tokens without the whole [tokens, vocabulary] in float32.

Legend: S scored tokens, H hidden, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    needs_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score each target token, and measure the entropy of its whole distribution.

    The logits ``hidden @ weight.T / temperature`` exist for one chunk at a time, in the forward
    pass and again in the backward pass, which recomputes them.

    Args:
        hidden_SH: float [S, H], the model's last hidden states, after its last norm.
        weight_VH: float [V, H], the output embedding.
        targets_S: int64 [S], in [0, V).
        temperature: divides the logits, > 0.
        chunk_tokens: rows of logits that exist in float32 at one time, >= 1.
        needs_entropy_gradient: whether a loss on the entropies is to be differentiated.

    Returns:
        Log-probs and entropies, both float32 [S] nats. Gradients reach ``hidden_SH`` and
        ``weight_VH`` from the log-probs, and from the entropies if asked for.
    """
    logprobs_S, entropies_S = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_SH, weight_VH, targets_S, temperature, chunk_tokens, needs_entropy_gradient
    )
    return logprobs_S, entropies_S


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_SH: Tensor,
        weight_VH: Tensor,
        targets_S: Tensor,
        temperature: float,
        chunk_tokens: int,
        needs_entropy_gradient: bool,  # noqa: FBT001
    ) -> tuple[Tensor, Tensor]:
        logprobs_S = hidden_SH.new_empty(len(targets_S), dtype=torch.float32)
        logsumexp_S = torch.empty_like(logprobs_S)
        entropies_S = torch.empty_like(logprobs_S)
        for begin in range(0, len(targets_S), chunk_tokens):
            chunk = slice(begin, begin + chunk_tokens)
            logits_CV = _logits(hidden_SH[chunk], weight_VH, temperature)
            logsumexp_C = torch.logsumexp(logits_CV, dim=1)
            all_logprobs_CV = logits_CV.sub_(logsumexp_C[:, None])
            logprobs_S[chunk] = all_logprobs_CV.gather(1, targets_S[chunk, None])[:, 0]
            entropies_S[chunk] = -torch.linalg.vecdot(all_logprobs_CV.exp(), all_logprobs_CV)
            logsumexp_S[chunk] = logsumexp_C
        ctx.save_for_backward(hidden_SH, weight_VH, targets_S, logsumexp_S, entropies_S)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.needs_entropy_gradient = needs_entropy_gradient
        if not needs_entropy_gradient:
            ctx.mark_non_differentiable(entropies_S)
        return logprobs_S, entropies_S

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *grads_S: Tensor,
    ) -> tuple[Tensor | None, ...]:
        logprob_grads_S, entropy_grads_S = grads_S
        hidden_SH, weight_VH, targets_S, logsumexp_S, entropies_S = ctx.saved_tensors
        hidden_grad_SH = torch.empty_like(hidden_SH)
        weight_grad_VH = None
        if ctx.needs_input_grad[1]:  # not of a frozen model
            # Float32 over the chunks: a sum of many bfloat16 parts would lose the small ones.
            weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for begin in range(0, len(targets_S), ctx.chunk_tokens):
            chunk = slice(begin, begin + ctx.chunk_tokens)
            logits_CV = _logits(hidden_SH[chunk], weight_VH, ctx.temperature)
            all_logprobs_CV = logits_CV.sub_(logsumexp_S[chunk, None])
            probs_CV = all_logprobs_CV.exp()
            slopes_CV = probs_CV * -logprob_grads_S[chunk, None]
            slopes_CV.scatter_add_(1, targets_S[chunk, None], logprob_grads_S[chunk, None])
            if ctx.needs_entropy_gradient:
                surprise_CV = all_logprobs_CV.add_(entropies_S[chunk, None])
                slopes_CV -= entropy_grads_S[chunk, None] * probs_CV * surprise_CV
            slopes_CV = slopes_CV.div_(ctx.temperature).to(hidden_SH.dtype)
            hidden_grad_SH[chunk] = slopes_CV @ weight_VH
            if weight_grad_VH is not None:
                weight_grad_VH += slopes_CV.T @ hidden_SH[chunk]
        if weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_SH, weight_grad_VH, None, None, None, None


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """Return ``hidden @ weight.T / temperature`` in float32 [C, V]."""
    return (hidden_CH @ weight_VH.T).float().div_(temperature)
