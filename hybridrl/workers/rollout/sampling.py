"""Draw next tokens from logits, with random numbers that depend on the sample alone.

Legend: N rows, V vocabulary, K candidate tokens of a row (K = V unless top-k is on).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hybridrl.batch import PromptBatch, row_offsets
from hybridrl.errors import EngineError
from hybridrl.workers.rollout.protocol import SamplingParams

_UINT64 = 1 << 64
_UNIFORM_BITS = 52


def _signed(value: int) -> int:
    return value - _UINT64 if value >= _UINT64 // 2 else value


# The increment and the multipliers of splitmix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom
# Number Generators", OOPSLA 2014), as int64: torch multiplies those modulo 2**64, as required.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits_N: Tensor, count: int) -> Tensor:
    # ">>" copies the sign bit of an int64; the mask makes it the unsigned shift of the paper.
    return (bits_N >> count) & ((1 << (64 - count)) - 1)


def _mix(bits_N: Tensor) -> Tensor:
    bits_N = (bits_N ^ _shift_right(bits_N, 30)) * _MULTIPLIER_1
    bits_N = (bits_N ^ _shift_right(bits_N, 27)) * _MULTIPLIER_2
    return bits_N ^ _shift_right(bits_N, 31)


def response_keys(seed_N: Tensor, sibling_N: Tensor) -> Tensor:
    """Name the random stream of each response.

    Args:
        seed_N: int64 [N], seed of the prompt.
        sibling_N: int64 [N], index of the response among those to the same prompt, from 0.

    Returns:
        int64 [N], for ``uniforms``.
    """
    return _mix(_mix(seed_N + _INCREMENT) + (sibling_N + 1) * _INCREMENT)


def request_key(seed: int, sibling: int, *, turn: int = 0) -> int:
    """Name the random stream of one response in a conversation; see ``response_keys``.

    Args:
        seed: of the prompt (``PromptBatch.seed_P``).
        sibling: index of the conversation among those that start with the same prompt, from 0.
        turn: of the conversation, from 0; the first has the stream of a single-turn response.
    """
    key = response_keys(torch.tensor([seed]), torch.tensor([sibling]))
    return int(response_keys(key, torch.tensor([turn]))) if turn else int(key)


def uniforms(key_N: Tensor, position_N: Tensor) -> Tensor:
    """Return the random number of one token of each response; equal inputs give equal numbers.

    Args:
        key_N: int64 [N], from ``response_keys``.
        position_N: int64 [N], position of the token in prompt + response, from 0.

    Returns:
        float64 [N], multiples of 2**-52 in [0, 1).
    """
    bits_N = _mix(key_N + (position_N + 1) * _INCREMENT)
    return _shift_right(bits_N, 64 - _UNIFORM_BITS).double() * 2.0**-_UNIFORM_BITS


def check_prompts(prompts: PromptBatch, *, max_context_tokens: int, vocab_size: int) -> None:
    """Refuse prompts that a model cannot continue.

    Raises:
        EngineError: a prompt is empty, too long, or not in the vocabulary.
    """
    tokens_T = prompts.token_ids_PL.values()
    offsets = row_offsets(prompts.token_ids_PL).tolist()
    limit = max_context_tokens - 1
    for prompt, (begin, end) in enumerate(pairwise(offsets)):
        if end == begin:
            raise EngineError(f"prompt {prompt} is empty: it needs at least 1 token")
        if end - begin > limit:
            raise EngineError(
                f"prompt {prompt} has {end - begin} tokens, and the engine's context of "
                f"{limit + 1} leaves room for {limit}; lower data.max_prompt_tokens"
            )
    if int(tokens_T.min()) < 0 or int(tokens_T.max()) >= vocab_size:
        raise EngineError(
            f"prompt tokens span {int(tokens_T.min())} to {int(tokens_T.max())}, and the model "
            f"knows 0 to {vocab_size - 1}; use the tokenizer that belongs to model.path"
        )


def check_sampling(sampling: SamplingParams, *, vocab_size: int) -> None:
    """Refuse illegal sampling parameters.

    Raises:
        EngineError: names the first parameter at fault, its value and its range.
    """
    group_size, limit = sampling.num_responses_per_prompt, sampling.max_response_tokens
    rules: tuple[tuple[str, float, bool, str], ...] = (
        ("num_responses_per_prompt", group_size, group_size >= 1, "at least 1"),
        ("max_response_tokens", limit, limit >= 1, "at least 1"),
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0 (greedy)"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]; 1 is off"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0; 0 is off"),
    )
    for name, value, is_kept, rule in rules:
        if not is_kept:
            raise EngineError(f"cannot sample with {name}={value}: set it {rule}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise EngineError(
                f"stop token {token} is not in the model's vocabulary of {vocab_size} tokens; "
                "use the tokenizer that belongs to model.path"
            )


def sample(logits_NV: Tensor, uniform_N: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at ``uniform_N``.

    The order is that of Hugging Face and vLLM: temperature, then top-k, then top-p over the result
    of top-k.

    Args:
        logits_NV: [N, V], any float type.
        uniform_N: float64 [N] in [0, 1); not read if greedy.
        sampling: temperature, top_p and top_k are used.

    Returns:
        Tokens, int64 [N]; and their log-probs, float32 [N] nats, at the sampling temperature (1
        if greedy), *before* top-k and top-p remove tokens: as the trainer computes them, and
        SGLang returns them. Logits with NaN give some token of the vocabulary and a log-prob that
        is not finite.
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


def _candidates(probs_NV: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
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
