"""Log-probs and entropies of given tokens without all of [tokens, vocabulary] in float32.

Legend: S scored tokens, H hidden, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.divergence import Comparison, TeacherTokens
from hybridrl.models.onednn import linear
from hybridrl.sampler import SamplingMasks

_LEFT_OUT = -1e30
"""Logit of a token that top-k or top-p removed: its probability is 0, and 0 times it is no NaN."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's rows of the output embedding, where several ranks share it."""

    begin: int
    """Token id of the first row."""

    group: dist.ProcessGroup
    """The ranks that share it."""


def token_logprobs(  # noqa: PLR0913 - what a head knows of its targets
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    needs_entropy_gradient: bool = False,
    shard: VocabShard | None = None,
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Score each target token, and measure the entropy of its full distribution.

    The logits ``hidden @ weight.T / temperature`` exist for one chunk at a time. The backward pass
    recomputes them.

    Args:
        hidden_SH: float [S, H], the model's last hidden states, after its last norm.
        weight_VH: float [V, H], the output embedding, or this rank's rows of it.
        targets_S: int64 [S], in [0, V) of the full vocabulary.
        chunk_tokens: rows of logits that exist in float32 at one time, >= 1.
        shard: set where ranks share the vocabulary; one collective then joins their results. The
            gradient of ``hidden_SH`` is this rank's part, to be summed over ranks.
        masks: of the S targets, each among its own: the distribution is renormalised over them (the
            sampling mask of DeepSeek-V3.2, arXiv:2512.02556, section 3.1). None: all of V.

    Returns:
        Log-probs and entropies, both float32 [S] nats. Gradients reach ``hidden_SH`` and
        ``weight_VH`` from the log-probs, and from the entropies if asked for.
    """
    logprobs_S, entropies_S = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        *(hidden_SH, weight_VH, targets_S, temperature, chunk_tokens),
        *(needs_entropy_gradient, shard, masks, None),
    )
    return logprobs_S, entropies_S


def compared_logprobs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_S: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    needs_entropy_gradient: bool = False,
    comparison: Comparison,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score as `token_logprobs`, and compare each token's full distribution with a teacher's.

    Returns:
        Log-probs, entropies and divergences, float32 [S] nats. Divergences have a gradient, too.
    """
    logprobs_S, entropies_S, divergences_S = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        *(hidden_SH, weight_VH, targets_S, temperature, chunk_tokens),
        *(needs_entropy_gradient, None, None, comparison),
    )
    return logprobs_S, entropies_S, divergences_S


@torch.no_grad()
def top_logprobs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    *,
    num_tokens: int,
    temperature: float,
    chunk_tokens: int,
) -> TeacherTokens:
    """Return the likeliest tokens at each position, on the host; of V all, in their order.

    Logits exist for one chunk at a time, as in `token_logprobs`.
    """
    logprobs_SK = torch.empty(len(hidden_SH), num_tokens)
    is_all = num_tokens == len(weight_VH)
    ids_SK = None if is_all else torch.empty(logprobs_SK.shape, dtype=torch.int32)
    for chunk in _chunks(hidden_SH, weight_VH, chunk_tokens):
        logprobs_CK = torch.log_softmax(_logits(hidden_SH[chunk], weight_VH, temperature), dim=1)
        if ids_SK is not None:
            logprobs_CK, ids_CK = logprobs_CK.topk(num_tokens, dim=1)
            ids_SK[chunk] = ids_CK.int().cpu()
        logprobs_SK[chunk] = logprobs_CK.cpu()
    return TeacherTokens(logprobs_SK, ids_SK)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - torch hands tensors and settings over one by one
        ctx: Any,  # noqa: ANN401
        hidden_SH: Tensor,
        weight_VH: Tensor,
        targets_S: Tensor,
        temperature: float,
        chunk_tokens: int,
        needs_entropy_gradient: bool,  # noqa: FBT001
        shard: VocabShard | None,
        masks: SamplingMasks | None,
        comparison: Comparison | None,
    ) -> tuple[Tensor, ...]:
        targets_S, is_own_S = _own_targets(targets_S, len(weight_VH), shard)
        logprobs_S = hidden_SH.new_zeros(len(targets_S), dtype=torch.float32)
        logsumexp_S = torch.full_like(logprobs_S, -torch.inf)
        entropies_S = torch.zeros_like(logprobs_S)
        divergences_S = torch.zeros_like(logprobs_S)
        for chunk in _chunks(targets_S, weight_VH, chunk_tokens):
            logits_CV = _logits(hidden_SH[chunk], weight_VH, temperature)
            _leave_out(logits_CV, chunk, masks, shard)
            logsumexp_C = torch.logsumexp(logits_CV, dim=1)
            all_logprobs_CV = logits_CV.sub_(logsumexp_C[:, None])
            logprobs_S[chunk] = all_logprobs_CV.gather(1, targets_S[chunk, None])[:, 0]
            entropies_S[chunk] = -torch.linalg.vecdot(all_logprobs_CV.exp(), all_logprobs_CV)
            if comparison is not None:
                divergences_S[chunk] = comparison.divergences(chunk, all_logprobs_CV)
            logsumexp_S[chunk] = logsumexp_C
        if shard is not None:
            logprobs_S.masked_fill_(~is_own_S, -torch.inf)
            logprobs_S, logsumexp_S, entropies_S = _join(
                logprobs_S, logsumexp_S, entropies_S, group=shard.group
            )
        ctx.save_for_backward(hidden_SH, weight_VH, targets_S, is_own_S, logsumexp_S, entropies_S)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.needs_entropy_gradient, ctx.comparison = needs_entropy_gradient, comparison
        ctx.shard, ctx.masks = shard, masks
        if not needs_entropy_gradient:
            ctx.mark_non_differentiable(entropies_S)
        scored = (logprobs_S, entropies_S)
        return scored if comparison is None else (*scored, divergences_S)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *grads_S: Tensor,
    ) -> tuple[Tensor | None, ...]:
        logprob_grads_S, entropy_grads_S, *divergence_grads = grads_S
        hidden_SH, weight_VH, targets_S, is_own_S, logsumexp_S, entropies_S = ctx.saved_tensors
        target_grads_S = logprob_grads_S.masked_fill(~is_own_S, 0.0)
        hidden_grad_SH = torch.zeros_like(hidden_SH)
        weight_grad_VH = None
        if ctx.needs_input_grad[1]:  # not of a frozen model
            # Float32 over the chunks: a sum of many bfloat16 terms would lose the small ones.
            weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for chunk in _chunks(targets_S, weight_VH, ctx.chunk_tokens):
            logits_CV = _logits(hidden_SH[chunk], weight_VH, ctx.temperature)
            _leave_out(logits_CV, chunk, ctx.masks, ctx.shard)
            all_logprobs_CV = logits_CV.sub_(logsumexp_S[chunk, None])
            probs_CV = all_logprobs_CV.exp()
            slopes_CV = probs_CV * -logprob_grads_S[chunk, None]
            slopes_CV.scatter_add_(1, targets_S[chunk, None], target_grads_S[chunk, None])
            for grads in divergence_grads:  # one, or none without a comparison
                slopes_CV += ctx.comparison.slopes(chunk, all_logprobs_CV, grads[chunk])
            if ctx.needs_entropy_gradient:
                surprise_CV = all_logprobs_CV.add_(entropies_S[chunk, None])
                slopes_CV -= entropy_grads_S[chunk, None] * probs_CV * surprise_CV
            slopes_CV = slopes_CV.div_(ctx.temperature).to(hidden_SH.dtype)
            hidden_grad_SH[chunk] = linear(slopes_CV, weight_VH.T)
            if weight_grad_VH is not None:
                weight_grad_VH += linear(slopes_CV.T, hidden_SH[chunk].T)
        if weight_grad_VH is not None:
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_SH, weight_grad_VH, *(None,) * 7


def _chunks(targets_S: Tensor, weight_VH: Tensor, chunk_tokens: int) -> Iterator[slice]:
    """Divide the targets; a rank without a row of the embedding gets no chunk."""
    num_targets = len(targets_S) if len(weight_VH) else 0
    for begin in range(0, num_targets, chunk_tokens):
        yield slice(begin, begin + chunk_tokens)


def _own_targets(
    targets_S: Tensor, num_rows: int, shard: VocabShard | None
) -> tuple[Tensor, Tensor]:
    """Return each target's row on this rank, 0 if another rank has it, and a mask of own rows."""
    if shard is None:
        return targets_S, torch.ones_like(targets_S, dtype=torch.bool)
    rows_S = targets_S - shard.begin
    is_own_S = (rows_S >= 0) & (rows_S < num_rows)
    return rows_S.masked_fill(~is_own_S, 0), is_own_S


def _join(
    logprobs_S: Tensor, logsumexp_S: Tensor, entropies_S: Tensor, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Join the distributions over shards of the vocabulary to one; one collective.

    With weights w of the shards the joint entropy is the sum of w (entropy - log w). A target has
    the log-prob -inf on a shard that lacks it.
    """
    own_3S = torch.stack([logprobs_S, logsumexp_S, entropies_S])
    everyone = [torch.empty_like(own_3S) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own_3S, group=group)
    logprobs_RS, logsumexp_RS, entropies_RS = torch.stack(everyone, dim=1)
    joint_S = torch.logsumexp(logsumexp_RS, dim=0)
    weights_RS = (logsumexp_RS - joint_S).exp()
    return (
        (logprobs_RS + logsumexp_RS - joint_S).amax(dim=0),
        joint_S,
        (weights_RS * entropies_RS + torch.special.entr(weights_RS)).sum(dim=0),
    )


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """Return ``hidden @ weight.T / temperature`` in float32 [C, V]."""
    return linear(hidden_CH, weight_VH).float().div_(temperature)


def _leave_out(
    logits_CV: Tensor, chunk: slice, masks: SamplingMasks | None, shard: VocabShard | None
) -> None:
    """Set the logits of tokens outside of each target's mask, in place, on each shard its own."""
    if masks is None:
        return
    counts_C = masks.counts_n[chunk]
    first = int(masks.counts_n[: chunk.start].sum())
    ids_M = masks.ids_M[first : first + int(counts_C.sum())].long()
    row_M = torch.arange(len(counts_C)).repeat_interleave(counts_C)
    if shard is not None:
        ids_M = ids_M - shard.begin
        is_own_M = (ids_M >= 0) & (ids_M < logits_CV.shape[1])
        ids_M, row_M = ids_M[is_own_M], row_M[is_own_M]
    is_out_CV = torch.ones_like(logits_CV, dtype=torch.bool)
    is_out_CV[row_M.to(logits_CV.device), ids_M.to(logits_CV.device)] = False
    logits_CV.masked_fill_(is_out_CV, _LEFT_OUT)
