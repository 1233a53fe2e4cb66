from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.algorithms.advantages.gae import gae
from hybridrl.batch import jagged, place_on_last_tokens

# Rows of (is it a response token, reward, value).
number = st.integers(-24, 24).map(lambda n: n / 8)
token = st.tuples(st.booleans(), number, number)
batches = st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=6)
rates = st.sampled_from([0.0, 0.3, 0.95, 1.0])
Row = list[tuple[bool, float, float]]


def columns_of(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    kinds = (torch.bool, torch.float32, torch.float32)
    mask, rewards, values = (
        jagged([torch.tensor([token[n] for token in row], dtype=kind) for row in batch])
        for n, kind in enumerate(kinds)
    )
    return mask, rewards, values


def obvious_advantages(row: Row, *, gamma: float, lam: float) -> list[float]:
    """The sum of arXiv:1506.02438, eq. 16, as it is written there, one token after the other."""
    chosen = [token for token in row if token[0]]
    deltas = []
    for t, (_, reward, value) in enumerate(chosen):
        next_value = chosen[t + 1][2] if t + 1 < len(chosen) else 0.0
        deltas.append(reward + gamma * next_value - value)
    sums = [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]
    found = iter(sums)
    return [next(found) if is_response else 0.0 for is_response, _, _ in row]


@given(batches, rates, rates)
def test_advantages_and_returns_equal_the_explicit_sum(
    batch: list[Row], gamma: float, lam: float
) -> None:
    mask, rewards, values = columns_of(batch)
    estimate = gae(rewards, values, mask, gamma=gamma, lam=lam, whiten=False)
    for number, row in enumerate(batch):
        advantages = obvious_advantages(row, gamma=gamma, lam=lam)
        returns = [
            a + value if is_response else 0.0
            for a, (is_response, _, value) in zip(advantages, row, strict=True)
        ]
        assert estimate.advantages_BL[number].tolist() == pytest.approx(advantages, abs=1e-4)
        assert estimate.returns_BL[number].tolist() == pytest.approx(returns, abs=1e-4)


@given(batches, rates)
def test_with_a_length_factor_long_rows_reach_further_and_returns_are_the_rewards_to_come(
    batch: list[Row], gamma: float
) -> None:
    mask, rewards, values = columns_of(batch)
    estimate = gae(rewards, values, mask, gamma=gamma, length_factor=0.4, whiten=False)
    for number, row in enumerate(batch):
        length = sum(is_response for is_response, _, _ in row)
        lam = 1 - 1 / (0.4 * length) if length > 2 else 0.0
        advantages = obvious_advantages(row, gamma=gamma, lam=lam)
        without_values = [(is_response, reward, 0.0) for is_response, reward, _ in row]
        returns = obvious_advantages(without_values, gamma=gamma, lam=1.0)
        assert estimate.advantages_BL[number].tolist() == pytest.approx(advantages, abs=1e-4)
        assert estimate.returns_BL[number].tolist() == pytest.approx(returns, abs=1e-4)


def test_a_length_factor_reaches_over_chunks_of_long_rows() -> None:
    rows = [[(True, float(t == n - 1), 0.0) for t in range(n)] for n in (700, 90, 1)]
    mask, rewards, values = columns_of(rows)
    estimate = gae(rewards, values, mask, length_factor=0.05, whiten=False)
    for row, length in zip(estimate.advantages_BL.unbind(), (700, 90, 1), strict=True):
        lam = 1 - 1 / max(0.05 * length, 1.0)
        expected = [lam ** (length - 1 - t) for t in range(length)]
        assert row.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert (estimate.returns_BL.values() == 1.0).all()


@given(batches)
def test_whitened_tokens_have_mean_0_and_deviation_1(batch: list[Row]) -> None:
    mask, rewards, values = columns_of(batch)
    plain = gae(rewards, values, mask, whiten=False)
    white = gae(rewards, values, mask, whiten=True)
    assert torch.equal(white.returns_BL.values(), plain.returns_BL.values())
    assert not white.advantages_BL.values()[~mask.values()].any()
    original = plain.advantages_BL.values()[mask.values()].double()
    chosen = white.advantages_BL.values()[mask.values()].double()
    if len(chosen) > 1:
        expected = (original - original.mean()) / (original.var() + 1e-8).sqrt()
        torch.testing.assert_close(chosen, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 1000])
def test_equal_advantages_are_whitened_to_exact_zeros(num_tokens: int) -> None:
    row: Row = [(False, 3.0, 0.0)] + [(True, 0.7, 0.0)] * num_tokens
    mask, rewards, values = columns_of([row])
    assert not gae(rewards, values, mask, lam=0.0).advantages_BL.values().any()


def test_no_gradient_flows_from_the_returns_into_the_values() -> None:
    mask, rewards, values = columns_of([[(True, 1.0, 0.5)]])
    assert not gae(rewards, values.requires_grad_(), mask).returns_BL.requires_grad


@given(batches)
def test_a_reward_is_earned_by_the_last_response_token(batch: list[Row]) -> None:
    mask, _, _ = columns_of(batch)
    rewards_B = torch.arange(1.0, len(batch) + 1)
    placed = place_on_last_tokens(rewards_B, mask)
    for number, row in enumerate(batch):
        last = max((n for n, token in enumerate(row) if token[0]), default=None)
        expected = [number + 1.0 if n == last else 0.0 for n in range(len(row))]
        assert placed[number].tolist() == expected


# Beside the edges of one chunk: long enough that chunks of chunks have two levels, too.
LENGTHS = (1, 63, 0, 64, 65, 4095, 4097, 8300, 0)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_long_rows_are_as_exact_as_one_token_after_the_other(lam: float) -> None:
    source = torch.Generator().manual_seed(0)
    mask = jagged([torch.arange(length + 3) >= 3 for length in LENGTHS])
    numbers = [torch.randn(2, length + 3, generator=source) for length in LENGTHS]
    rewards, values = (jagged([pair[n] for pair in numbers]) for n in (0, 1))
    estimate = gae(rewards, values, mask, gamma=0.99, lam=lam, whiten=False)
    for number, length in enumerate(LENGTHS):
        row_rewards, row_values = rewards[number][3:].double(), values[number][3:].double()
        advantage, next_value = 0.0, 0.0
        expected = torch.zeros(length, dtype=torch.float64)
        for t in reversed(range(length)):
            delta = float(row_rewards[t]) + 0.99 * next_value - float(row_values[t])
            advantage = delta + 0.99 * lam * advantage
            next_value = float(row_values[t])
            expected[t] = advantage
        assert not estimate.advantages_BL[number][:3].any()
        assert torch.allclose(estimate.advantages_BL[number][3:].double(), expected, atol=2e-5)
