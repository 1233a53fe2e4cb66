"""Draw next tokens from logits, with given random numbers; check what requests ask for.

Legend: N rows, V vocabulary, K candidate tokens of a row (K = V unless top-k is on).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.errors import RequestError
from hybridrl.models.divergence import TeacherTokens
from hybridrl.sampler import RequestParams, SampleRequest, SamplingMasks


class DrawParams(NamedTuple):
    """How to draw a token; see ``RequestParams``. Hashed for each row of mixed requests."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    returns_masks: bool = False


def check_request(request: SampleRequest, *, max_context_tokens: int, vocab_size: int) -> None:
    """Refuse (RequestError) a request that a model cannot answer."""
    _check_params(request.params, num_responses=len(request.keys), vocab_size=vocab_size)
    tokens_L = request.token_ids
    limit = max_context_tokens - 1
    num_tokens = len(tokens_L)
    if num_tokens == 0:
        raise RequestError("the prompt of a request is empty: it needs at least 1 token")
    if num_tokens > limit:
        raise RequestError(
            f"the prompt of a request has {num_tokens} tokens, and the engine's context of "
            f"{limit + 1} leaves room for {limit}; lower data.max_prompt_tokens"
        )
    array_L = tokens_L.numpy()  # finds the bounds of few numbers sooner than torch
    smallest, largest = int(array_L.min()), int(array_L.max())
    if smallest < 0 or largest >= vocab_size:
        raise RequestError(
            f"prompt tokens span {smallest} to {largest}, and the model knows 0 to "
            f"{vocab_size - 1}; use the tokenizer that belongs to model.path"
        )


def _check_params(params: RequestParams, *, num_responses: int, vocab_size: int) -> None:
    rules: tuple[tuple[str, float, bool, str], ...] = (
        ("num_responses", num_responses, num_responses >= 1, "at least 1"),
        ("max_new_tokens", params.max_new_tokens, params.max_new_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, params.temperature >= 0, "at least 0 (greedy)"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "in (0, 1]; 1 is off"),
        ("top_k", params.top_k, params.top_k >= 0, "at least 0; 0 is off"),
    )
    for name, value, is_kept, rule in rules:
        if not is_kept:
            raise RequestError(f"cannot sample with {name}={value}: set it {rule}")
    stops = params.stop_token_ids
    if stops and not 0 <= min(stops) <= max(stops) < vocab_size:
        token = next(token for token in stops if not 0 <= token < vocab_size)
        raise RequestError(
            f"stop token {token} is not in the model's vocabulary of {vocab_size} tokens; "
            "use the tokenizer that belongs to model.path"
        )


def score(logits_NV: Tensor, token_N: Tensor, temperature: float, num_likeliest: int) -> Tensor:
    """Score given tokens, and the likeliest ones, by these logits: see ``Sample.teacher_JL``."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=1)
    own_1N = logprobs_NV.gather(1, token_N[:, None].to(logits_NV.device)).T
    likeliest = TeacherTokens(*logprobs_NV.topk(num_likeliest, dim=1))
    return torch.cat([own_1N, likeliest.columns()]).cpu()


def sample(logits_NV: Tensor, uniform_N: Tensor, sampling: DrawParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at ``uniform_N``.

    The order is that of Hugging Face and vLLM: temperature, then top-k, then top-p over the result
    of top-k. ``uniform_N`` is float64 in [0, 1), and not read if greedy.

    Returns tokens, int64 [N]; and their log-probs, float32 [N] nats, at the sampling temperature (1
    if greedy), *before* top-k and top-p remove tokens: as the trainer computes them, and SGLang
    returns them. NaN logits give some token and a log-prob that is not finite.
    """
    logits_NV = logits_NV.float()
    if sampling.temperature == 0.0:
        best_N, token_N = logits_NV.max(dim=-1)
        return token_N, best_N - logits_NV.logsumexp(dim=-1)
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / sampling.temperature
    probs_NV = torch.softmax(logits_NV, dim=-1)
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return _invert(probs_NV, uniform_N)
    probs_NK, token_NK = _candidates(probs_NV, sampling)
    choice_N, _ = _invert(probs_NK, uniform_N)
    token_N1 = token_NK.gather(1, choice_N[:, None])
    return token_N1[:, 0], probs_NV.gather(1, token_N1)[:, 0].log()


def sample_with_masks(
    logits_NV: Tensor, uniform_N: Tensor, sampling: DrawParams
) -> tuple[Tensor, Tensor, SamplingMasks]:
    """Draw as ``sample``; return the tokens that were left, too, and log-probs among these."""
    probs_NV = torch.softmax(logits_NV.float() / sampling.temperature, dim=-1)
    probs_NK, token_NK = _candidates(probs_NV, sampling)
    choice_N, logprob_N = _invert(probs_NK, uniform_N)
    is_left_NK = probs_NK > 0
    masks = SamplingMasks(token_NK[is_left_NK].int().cpu(), is_left_NK.sum(dim=1).int().cpu())
    return token_NK.gather(1, choice_N[:, None])[:, 0], logprob_N, masks


def _candidates(probs_NV: Tensor, sampling: DrawParams) -> tuple[Tensor, Tensor]:
    """Return the probabilities (not renormalised) and ids of the tokens left, likeliest first."""
    vocab_size = probs_NV.shape[1]
    if 0 < sampling.top_k < vocab_size:
        probs_NK, token_NK = probs_NV.topk(sampling.top_k, dim=-1)
    else:
        probs_NK, token_NK = probs_NV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_p < 1.0:
        sums_NK = probs_NK.cumsum(dim=-1, dtype=torch.float64)
        # A token stays if those before it miss top_p: the likeliest always does.
        is_out_NK = sums_NK - probs_NK >= sampling.top_p * sums_NK[:, -1:]
        probs_NK = probs_NK.masked_fill(is_out_NK, 0.0)
    return probs_NK, token_NK


def _invert(probs_NK: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Pick column k of each row with probability p[k] / sum(p); returns columns and log-probs, [N].

    The sums are float64: in float32 the tail of a large vocabulary drowns in their rounding, and
    on CUDA they are not even monotonic. uniform <= 1 - 2**-52 puts the threshold below the last sum
    after rounding too, so that a column of probability 0 is never picked.
    """
    sums_NK = probs_NK.cumsum(dim=-1, dtype=torch.float64)
    total_N1 = sums_NK[:, -1:]
    choice_N1 = torch.searchsorted(sums_NK, uniform_N[:, None] * total_N1, right=True)
    choice_N1.clamp_(
        max=probs_NK.shape[1] - 1
    )  # only NaN needs this; it must not index past the end
    logprob_N1 = (probs_NK.gather(1, choice_N1) / total_N1).log()
    return choice_N1[:, 0], logprob_N1[:, 0].float()
