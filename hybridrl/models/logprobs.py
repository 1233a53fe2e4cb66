"""Log-probs and entropies of given tokens without all of [tokens, vocabulary] in float32.

Legend: S scored tokens, N named tokens at each of them, H hidden, V vocabulary, C tokens of one
chunk, R ranks that share a vocabulary, K likeliest tokens.
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

    begin: int  # token id of the first row
    group: dist.ProcessGroup  # the ranks that share it


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
    comparison: Comparison | None = None,
) -> tuple[Tensor, ...]:
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
        comparison: with a teacher's distributions; on a shard its tokens have ids.

    Returns:
        Log-probs and entropies, float32 [S] nats, and divergences if they are compared. Gradients
        reach ``hidden_SH`` and ``weight_VH`` from log-probs and divergences, and from the entropies
        if asked for.
    """
    named_SN, ids_SK = targets_S[:, None], None if comparison is None else comparison.teacher.ids_SK
    if ids_SK is not None:
        named_SN = torch.cat([named_SN, ids_SK.to(targets_S.device)], dim=1)
    logprobs_SN, *measured = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        *(hidden_SH, weight_VH, named_SN, temperature, chunk_tokens),
        *(needs_entropy_gradient, shard, masks, comparison if ids_SK is None else None),
    )
    if comparison is not None and ids_SK is not None:
        measured.append(comparison.of_named(logprobs_SN[:, 1:]))
    return logprobs_SN[:, 0], *measured


@torch.no_grad()
def top_logprobs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    *,
    num_tokens: int,
    temperature: float,
    chunk_tokens: int,
    shard: VocabShard | None = None,
) -> TeacherTokens:
    """Return the likeliest tokens at each position, on the host; of V all, in their order.

    Logits exist for one chunk at a time, as in `token_logprobs`. On a ``shard`` they are those of
    all ranks that share the vocabulary, with ids.
    """
    num_own = min(num_tokens, len(weight_VH))
    logprobs_SK = torch.full((len(hidden_SH), num_tokens), -torch.inf)
    logsumexp_S = torch.full((len(hidden_SH),), -torch.inf)
    is_all = shard is None and num_tokens == len(weight_VH)
    ids_SK = None if is_all else torch.zeros(logprobs_SK.shape, dtype=torch.int32)
    for chunk in _chunks(hidden_SH, weight_VH, chunk_tokens):
        logits_CV = _logits(hidden_SH[chunk], weight_VH, temperature)
        logprobs_CK = torch.log_softmax(logits_CV, dim=1)
        if ids_SK is not None:
            logprobs_CK, ids_CK = logprobs_CK.topk(num_own, dim=1)
            ids_SK[chunk, :num_own] = ids_CK.int().cpu()
        logprobs_SK[chunk, :num_own] = logprobs_CK.cpu()
        if shard is not None:
            logsumexp_S[chunk] = torch.logsumexp(logits_CV, dim=1).cpu()
    likeliest = TeacherTokens(logprobs_SK, ids_SK)
    if shard is None:
        return likeliest
    columns = torch.cat([logsumexp_S[None], likeliest.columns()]).to(hidden_SH.device)
    return _likeliest_of_all(columns, shard)


def _likeliest_of_all(columns: Tensor, shard: VocabShard) -> TeacherTokens:
    """Return the likeliest tokens of all shards, which are among those of each; one collective.

    ``columns`` are of this shard: log of its sum, K log-probs within it, K ids.
    """
    num_tokens = len(columns) // 2
    columns[1 + num_tokens :] += shard.begin
    everyone, ends = _gather(columns, shard.group), (1, 1 + num_tokens)
    sums_R1S, logprobs_RKS, ids_RKS = everyone.tensor_split(ends, dim=1)
    logprobs_RKS = logprobs_RKS + sums_R1S - torch.logsumexp(sums_R1S, dim=0)
    best_KS, index_KS = logprobs_RKS.flatten(0, 1).topk(num_tokens, dim=0)
    best = torch.cat([best_KS, ids_RKS.flatten(0, 1).gather(0, index_KS)])
    return TeacherTokens.of_columns(best.cpu(), num_tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - torch hands tensors and settings over one by one
        ctx: Any,  # noqa: ANN401
        hidden_SH: Tensor,
        weight_VH: Tensor,
        named_SN: Tensor,
        temperature: float,
        chunk_tokens: int,
        needs_entropy_gradient: bool,  # noqa: FBT001
        shard: VocabShard | None,
        masks: SamplingMasks | None,
        comparison: Comparison | None,
    ) -> tuple[Tensor, ...]:
        rows_SN, is_own_SN = named_SN, torch.ones_like(named_SN, dtype=torch.bool)
        if shard is not None:
            rows_SN = named_SN - shard.begin
            is_own_SN = (rows_SN >= 0) & (rows_SN < len(weight_VH))
            rows_SN = rows_SN.masked_fill(~is_own_SN, 0)  # another rank has them
        logprobs_SN = hidden_SH.new_zeros(rows_SN.shape, dtype=torch.float32)
        logsumexp_S = hidden_SH.new_full(rows_SN.shape[:1], -torch.inf, dtype=torch.float32)
        entropies_S = torch.zeros_like(logsumexp_S)
        divergences_S = torch.zeros_like(logsumexp_S)
        for chunk in _chunks(rows_SN, weight_VH, chunk_tokens):
            logits_CV = _logits(hidden_SH[chunk], weight_VH, temperature)
            _leave_out(logits_CV, chunk, masks, shard)
            logsumexp_C = torch.logsumexp(logits_CV, dim=1)
            all_logprobs_CV = logits_CV.sub_(logsumexp_C[:, None])
            logprobs_SN[chunk] = all_logprobs_CV.gather(1, rows_SN[chunk])
            entropies_S[chunk] = -torch.linalg.vecdot(all_logprobs_CV.exp(), all_logprobs_CV)
            if comparison is not None:
                divergences_S[chunk] = comparison.divergences(chunk, all_logprobs_CV)
            logsumexp_S[chunk] = logsumexp_C
        if shard is not None:
            logprobs_SN.masked_fill_(~is_own_SN, -torch.inf)
            logprobs_SN, logsumexp_S, entropies_S = _join(
                logprobs_SN, logsumexp_S, entropies_S, group=shard.group
            )
        ctx.save_for_backward(hidden_SH, weight_VH, rows_SN, is_own_SN, logsumexp_S, entropies_S)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.needs_entropy_gradient, ctx.comparison = needs_entropy_gradient, comparison
        ctx.shard, ctx.masks = shard, masks
        if not needs_entropy_gradient:
            ctx.mark_non_differentiable(entropies_S)
        scored = (logprobs_SN, entropies_S)
        return scored if comparison is None else (*scored, divergences_S)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        logprob_grads_SN, entropy_grads_S, *divergence_grads = grads
        hidden_SH, weight_VH, rows_SN, is_own_SN, logsumexp_S, entropies_S = ctx.saved_tensors
        own_grads_SN = logprob_grads_SN.masked_fill(~is_own_SN, 0.0)
        logprob_grads_S1 = logprob_grads_SN.sum(dim=1, keepdim=True)
        hidden_grad_SH = torch.zeros_like(hidden_SH)
        weight_grad_VH = None
        if ctx.needs_input_grad[1]:  # not of a frozen model
            # Float32 over the chunks: a sum of many bfloat16 terms would lose the small ones.
            weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for chunk in _chunks(rows_SN, weight_VH, ctx.chunk_tokens):
            logits_CV = _logits(hidden_SH[chunk], weight_VH, ctx.temperature)
            _leave_out(logits_CV, chunk, ctx.masks, ctx.shard)
            all_logprobs_CV = logits_CV.sub_(logsumexp_S[chunk, None])
            probs_CV = all_logprobs_CV.exp()
            slopes_CV = probs_CV * -logprob_grads_S1[chunk]
            slopes_CV.scatter_add_(1, rows_SN[chunk], own_grads_SN[chunk])
            for grads_S in divergence_grads:  # one, or none without a comparison
                slopes_CV += ctx.comparison.slopes(chunk, all_logprobs_CV, grads_S[chunk])
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


def _join(
    logprobs_SN: Tensor, logsumexp_S: Tensor, entropies_S: Tensor, *, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Join the distributions over shards of the vocabulary to one; one collective.

    With weights w of the shards the joint entropy is the sum of w (entropy - log w). A token has
    the log-prob -inf on a shard that lacks it.
    """
    everyone = _gather(torch.cat([torch.stack([logsumexp_S, entropies_S]), logprobs_SN.T]), group)
    logsumexp_RS, entropies_RS, logprobs_RNS = everyone[:, 0], everyone[:, 1], everyone[:, 2:]
    joint_S = torch.logsumexp(logsumexp_RS, dim=0)
    weights_RS = (logsumexp_RS - joint_S).exp()
    return (
        (logprobs_RNS + logsumexp_RS[:, None] - joint_S).amax(dim=0).T.contiguous(),
        joint_S,
        (weights_RS * entropies_RS + torch.special.entr(weights_RS)).sum(dim=0),
    )


def _gather(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of all ranks of a group, by rank."""
    everyone = [torch.empty_like(columns) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, columns.contiguous(), group=group)
    return torch.stack(everyone)


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
