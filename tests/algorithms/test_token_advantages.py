"""Advantages token by token, against plain loops over rows and tokens."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.distillation import distillation
from hybridrl.algorithms.advantages.gae import bi_level_gae, gae
from hybridrl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from hybridrl.algorithms.advantages.reinforce import reinforce, reinforce_plus_plus, remax
from hybridrl.algorithms.advantages.turns import turn_grpo, turn_reinforce
from hybridrl.batch import jagged

Singletons = Literal["zero", "reward"]
Align = Literal["response", "position"]
Matrix = list[list[float]]


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens with gaps; masked tokens hold ``filler``."""

    group: list[int]
    mask: list[list[bool]]
    rewards: Matrix
    logprobs: Matrix
    others: Matrix
    greedy: list[float]
    filler: float = 0.0

    def column(self, values: Matrix) -> Tensor:
        return jagged(
            [
                torch.tensor([v if on else self.filler for v, on in zip(row, mask, strict=True)])
                for row, mask in zip(values, self.mask, strict=True)
            ]
        )

    @property
    def mask_BL(self) -> Tensor:
        return jagged([torch.tensor(row, dtype=torch.bool) for row in self.mask])


def random_tokens(seed: int) -> Tokens:
    source = random.Random(seed)
    sizes = [source.randrange(0, 12) for _ in range(12)]

    def matrix(low: float, high: float) -> Matrix:
        return [[source.uniform(low, high) for _ in range(size)] for size in sizes]

    return Tokens(
        group=[source.choice([2, 5, 5, 9]) for _ in sizes[:-1]] + [-1],  # one of them is alone
        mask=[[source.random() < 0.6 for _ in range(size)] for size in sizes[:-2]]
        + [[False] * sizes[-2], [True] * sizes[-1]],
        rewards=matrix(-1, 1),
        logprobs=matrix(-3, 0),
        others=matrix(0, 0.6),
        greedy=[source.uniform(-1, 1) for _ in sizes],
    )


def returns_of(tokens: Tokens, *, gamma: float) -> Matrix:
    rows = []
    for rewards, mask in zip(tokens.rewards, tokens.mask, strict=True):
        row, running = [0.0] * len(mask), 0.0
        for t in reversed(range(len(mask))):
            if mask[t]:
                running = row[t] = rewards[t] + gamma * running
        rows.append(row)
    return rows


def flat(rows: Matrix, mask: list[list[bool]]) -> list[float]:
    pairs = [p for row, on in zip(rows, mask, strict=True) for p in zip(row, on, strict=True)]
    return [value if is_on else 0.0 for value, is_on in pairs]


def chosen(rows: Matrix, mask: list[list[bool]]) -> list[float]:
    pairs = [p for row, on in zip(rows, mask, strict=True) for p in zip(row, on, strict=True)]
    return [value for value, is_on in pairs if is_on]


def otb(tokens: Tokens, *, align: Align = "response", alone: Singletons = "zero") -> Tensor:
    return optimal_token_baseline(
        tokens.column(tokens.rewards),
        torch.tensor(tokens.group),
        tokens.mask_BL,
        tokens.column(tokens.logprobs),
        tokens.column(tokens.others),
        align=align,
        singletons=alone,
    )


ESTIMATORS: dict[str, Callable[[Tokens], Tensor]] = {
    "gae": lambda x: gae(x.column(x.rewards), x.column(x.others), x.mask_BL).advantages_BL,
    "bi_level_gae": lambda x: (
        bi_level_gae(x.column(x.rewards), x.column(x.others), x.mask_BL).advantages_BL
    ),
    "turn_grpo": lambda x: turn_grpo(x.column(x.rewards), torch.tensor(x.group), x.mask_BL),
    "turn_reinforce": lambda x: turn_reinforce(x.column(x.rewards), x.mask_BL, gamma=0.9),
    "reinforce": lambda x: reinforce(x.column(x.rewards), x.mask_BL, gamma=0.9),
    "reinforce_plus_plus": lambda x: reinforce_plus_plus(x.column(x.rewards), x.mask_BL),
    "remax": lambda x: remax(x.column(x.rewards), torch.tensor(x.greedy), x.mask_BL),
    "distillation": lambda x: distillation(x.column(x.logprobs), x.column(x.others), x.mask_BL),
    "optimal_token_baseline": otb,
    "the same by position": lambda x: otb(x, align="position"),
}


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_rewards_to_come_skip_what_the_policy_did_not_choose(seed: int, gamma: float) -> None:
    tokens = random_tokens(seed)
    rewards_BL, returns = tokens.column(tokens.rewards), returns_of(tokens, gamma=gamma)
    plain_BL = reinforce(rewards_BL, tokens.mask_BL, gamma=gamma)
    assert plain_BL.values().tolist() == pytest.approx(flat(returns, tokens.mask), abs=1e-5)
    selected = chosen(returns, tokens.mask)
    mean, variance = statistics.fmean(selected), statistics.variance(selected)
    white = [[(g - mean) / math.sqrt(variance + 1e-8) for g in row] for row in returns]
    white_BL = reinforce_plus_plus(rewards_BL, tokens.mask_BL, gamma=gamma)
    assert white_BL.values().tolist() == pytest.approx(flat(white, tokens.mask), abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_the_greedy_response_is_the_baseline(seed: int) -> None:
    tokens = random_tokens(seed)
    returns = returns_of(tokens, gamma=1.0)
    expected = [[g - b for g in row] for row, b in zip(returns, tokens.greedy, strict=True)]
    advantages_BL = ESTIMATORS["remax"](tokens)
    assert advantages_BL.values().tolist() == pytest.approx(flat(expected, tokens.mask), abs=1e-5)


def test_the_teacher_raises_what_it_finds_likelier() -> None:
    mask_BL = jagged([torch.tensor([True, True, False]), torch.tensor([True])])
    old_BL = jagged([torch.tensor([-1.0, -3.0, math.nan]), torch.tensor([-0.5])])
    teacher_BL = jagged([torch.tensor([-2.0, -0.5, 1.0]), torch.tensor([-math.inf])])
    k1_BL = distillation(old_BL, teacher_BL, mask_BL)
    assert k1_BL.values().tolist() == [-1.0, 2.5, 0.0, -20.0]
    k3_BL = distillation(old_BL, teacher_BL, mask_BL, estimator="k3", limit=10.0)
    expected = [-(math.exp(-1) - 1 + 1), -(math.exp(2.5) - 1 - 2.5), 0.0, -10.0]
    assert k3_BL.values().tolist() == pytest.approx(expected)


def test_baselines_of_sure_tokens_lie_between_the_rewards() -> None:
    mask_BL = jagged([torch.tensor([True])] * 2)
    advantages_BL = optimal_token_baseline(
        jagged([torch.tensor([1.0]), torch.tensor([0.0])]),
        torch.tensor([0, 0]),
        mask_BL,
        jagged([torch.tensor([0.0])] * 2),
        jagged([torch.tensor([1 + 1e-6]), torch.tensor([1 - 1e-6])]),
    )
    assert float(advantages_BL.values().abs().max()) <= 1.0


def obvious_baselines(tokens: Tokens, *, align: Align) -> Matrix:
    """The formula of optimal_token_baseline, step by step; 0 where no other response goes on."""
    returns, baselines = returns_of(tokens, gamma=1.0), [[0.0] * len(row) for row in tokens.mask]
    steps: dict[tuple[int, int], list[tuple[float, float, int, int]]] = {}
    for b, mask in enumerate(tokens.mask):
        weight, positions = 0.0, [t for t, on in enumerate(mask) if on]
        for index, t in enumerate(positions):
            weight += 1 - 2 * math.exp(tokens.logprobs[b][t]) + tokens.others[b][t]
            step = index if align == "response" else t - positions[0]
            steps.setdefault((tokens.group[b], step), []).append((weight, returns[b][t], b, t))
    for (group, step), entries in steps.items():
        baseline = sum(w * g for w, g, _, _ in entries) / (sum(w for w, *_ in entries) + 1e-8)
        counts = [sum(m) for m, g in zip(tokens.mask, tokens.group, strict=True) if g == group]
        second, longest = [0, *sorted(counts)][-2:]
        for _, _, b, t in entries:
            is_alone = sum(tokens.mask[b]) == longest > second and step >= second
            baselines[b][t] = 0.0 if is_alone else baseline
    return baselines


@pytest.mark.parametrize("alone", ["zero", "reward"])
@pytest.mark.parametrize("align", ["response", "position"])
@pytest.mark.parametrize("seed", range(8))
def test_each_token_has_its_own_baseline(seed: int, align: Align, alone: Singletons) -> None:
    tokens = random_tokens(seed)
    tokens = replace(tokens, others=[[p + 1 for p in row] for row in tokens.others])  # w > 0
    returns, baselines = returns_of(tokens, gamma=1.0), obvious_baselines(tokens, align=align)
    expected = [
        [g - b for g, b in zip(*rows, strict=True)] for rows in zip(returns, baselines, strict=True)
    ]
    if alone == "zero":
        expected = [
            row if tokens.group.count(group) > 1 else [0.0] * len(row)
            for row, group in zip(expected, tokens.group, strict=True)
        ]
    advantages_BL = otb(tokens, align=align, alone=alone)
    assert advantages_BL.values().tolist() == pytest.approx(flat(expected, tokens.mask), abs=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
def test_tokens_outside_responses_are_never_read(name: str, filler: float) -> None:
    tokens = random_tokens(1)
    spoiled_BL = ESTIMATORS[name](replace(tokens, filler=filler))
    assert torch.equal(spoiled_BL.values(), ESTIMATORS[name](tokens).values())
    assert not spoiled_BL.values()[~tokens.mask_BL.values()].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_response_token_at_all_gives_zeros(name: str) -> None:
    tokens = random_tokens(5)
    empty = replace(tokens, mask=[[False] * len(row) for row in tokens.mask])
    assert not ESTIMATORS[name](empty).values().any()
    one = replace(empty, mask=[[t == 0 for t in range(len(row))] for row in tokens.mask])
    assert bool(ESTIMATORS[name](one).values().isfinite().all())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_token_advantages_carry_no_gradient(name: str) -> None:
    tokens = random_tokens(0)
    column = Tokens.column

    def with_gradient(self: Tokens, values: Matrix) -> Tensor:
        return column(self, values).requires_grad_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokens, "column", with_gradient)
        assert not ESTIMATORS[name](tokens).requires_grad
