from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.errors import EngineError
from hybridrl.sampler import SampleRequest, SamplingParams, response_keys, uniforms
from hybridrl.workers.rollout.sampling import DrawParams, check_request, sample, sample_with_masks
from tests.workers.rollout.engines import sampling_params

MASK = (1 << 64) - 1
LARGEST_UNIFORM = 1.0 - 2.0**-52


def splitmix64(state: int) -> int:
    """The published finaliser, with Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def reference_uniform(seed: int, sibling: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = splitmix64((splitmix64((seed + golden) & MASK) + (sibling + 1) * golden) & MASK)
    return (splitmix64((key + (position + 1) * golden) & MASK) >> 12) / 2**52


def draw(seed: int, sibling: int, position: int) -> float:
    key = response_keys(torch.tensor([seed]), torch.tensor([sibling]))
    return uniforms(key, torch.tensor([position])).item()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.integers(0, 2**20))
def test_uniforms_are_those_of_splitmix64(seed: int, sibling: int, position: int) -> None:
    assert draw(seed, sibling, position) == reference_uniform(seed, sibling, position)


def sample_one(logits_NV: Tensor, uniform: float, **params: Any) -> tuple[Tensor, Tensor]:
    uniform_1 = torch.tensor([uniform], dtype=torch.float64)
    return sample(logits_NV, uniform_1, DrawParams(**{"temperature": 1.0} | params))


def frequencies(logits_V: Tensor, sampling: DrawParams) -> Tensor:
    """How often each token comes if uniforms are spread evenly over [0, 1)."""
    uniforms_N = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    tokens, _ = sample(logits_V.expand(10_000, -1), uniforms_N, sampling)
    return torch.bincount(tokens, minlength=len(logits_V)) / 10_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    logits_V = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    expected = torch.softmax(logits_V / temperature, dim=0)
    got = frequencies(logits_V, DrawParams(temperature=temperature))
    torch.testing.assert_close(got, expected, atol=3e-4, rtol=0)


def kept_by_definition(probs: list[float], top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = order[: top_k or len(order)]
    total, before, kept = sum(probs[token] for token in order), 0.0, set()
    for token in order:
        if before < top_p * total:
            kept.add(token)
        before += probs[token]
    return kept


@given(
    logits=st.lists(st.integers(-60, 60), min_size=2, max_size=12, unique=True),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.05, 1.0),
    uniform=st.floats(0.0, LARGEST_UNIFORM),
)
def test_top_k_and_top_p_choose_tokens_and_leave_their_logprobs(
    logits: list[int], top_k: int, top_p: float, uniform: float
) -> None:
    logits_V = torch.tensor(logits) / 10.0
    probs = torch.softmax(logits_V.double(), dim=0).tolist()
    kept = kept_by_definition(probs, top_k, top_p)
    sampling = DrawParams(1.0, top_k=top_k, top_p=top_p)
    token, logprob = sample(logits_V[None], torch.tensor([uniform], dtype=torch.float64), sampling)
    assert token.item() in kept
    expected = math.log(probs[int(token)])  # as a trainer computes it, which knows of no top-k
    assert logprob.item() == pytest.approx(expected, abs=1e-4)
    uniform_N = torch.tensor([uniform, uniform], dtype=torch.float64)
    token_N, logprob_N, masks = sample_with_masks(logits_V.expand(2, -1), uniform_N, sampling)
    assert token_N.tolist() == 2 * token.tolist()
    assert [set(part.tolist()) for part in masks.ids_M.split(masks.counts_n.tolist())] == 2 * [kept]
    expected -= math.log(sum(probs[each] for each in kept))
    assert logprob_N.tolist() == pytest.approx([expected, expected], abs=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits_NV = torch.full((1, 1000), -float("inf"))
    logits_NV[0, 400:600] = torch.linspace(-3, 3, 200)
    token, logprob = sample_one(logits_NV, uniform)
    assert 400 <= token.item() < 600
    assert logprob.isfinite().all()


def test_a_tail_below_float32_rounding_keeps_its_share() -> None:
    logits_V = torch.zeros(100_000)
    logits_V[0] = 30.0  # the others have 1e5 * e^-30 = 9.4e-9 together: lost in a float32 sum
    token, _ = sample_one(logits_V[None], 1.0 - 1e-9)
    assert token.item() > 0


def test_greedy_takes_the_best_token_and_its_logprob_at_temperature_one() -> None:
    logits_NV = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 4.0]])
    token_N, logprob_N = sample(
        logits_NV, torch.zeros(2, dtype=torch.float64), DrawParams(temperature=0.0)
    )
    assert token_N.tolist() == [1, 0]
    expected = torch.log_softmax(logits_NV, dim=-1).amax(dim=-1)
    torch.testing.assert_close(logprob_N, expected)


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_nan_logits_stay_within_the_vocabulary_and_show_in_the_logprob(top_p: float) -> None:
    logits_NV = torch.full((1, 7), float("nan"))
    token, logprob = sample_one(logits_NV, 0.5, top_p=top_p)
    assert 0 <= token.item() < 7
    assert not logprob.isfinite().any()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (sampling_params(group=0), "num_responses=0"),
        (sampling_params(tokens=0), "max_new_tokens=0"),
        (sampling_params(temperature=-1.0), "temperature=-1.0"),
        (sampling_params(temperature=float("nan")), "temperature=nan"),
        (sampling_params(top_p=0.0), "top_p=0.0"),
        (sampling_params(top_p=1.1), "top_p=1.1"),
        (sampling_params(top_k=-1), "top_k=-1"),
        (sampling_params(stop=(3, 10)), "stop token 10"),
    ],
)
def test_parameters_out_of_range_are_named(sampling: SamplingParams, message: str) -> None:
    keys = range(sampling.num_responses_per_prompt)
    request = SampleRequest(torch.tensor([1]), sampling.request_params(), keys)
    with pytest.raises(EngineError, match=message):
        check_request(request, max_context_tokens=10, vocab_size=10)
