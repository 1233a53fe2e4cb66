"""Advantages of one number per row, against their definitions, one group after the other."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.advantages.group_baselines import gpg, opmd, opo, rloo
from hybridrl.algorithms.advantages.grpo import gdpo, grpo, grpo_passk
from hybridrl.algorithms.advantages.reinforce import reinforce_plus_plus_baseline
from hybridrl.batch import jagged, spread_over_tokens

Singletons = Literal["zero", "reward"]
Over = Literal["sequences", "tokens"]
ALONE = ("zero", "reward")


@dataclass(frozen=True)
class Rows:
    """What an estimator may read; rows of one group need not be adjacent."""

    rewards_B: Tensor
    group_B: Tensor
    lengths: Sequence[int]

    @property
    def mask_BL(self) -> Tensor:
        return jagged([torch.arange(n + 3) >= 3 for n in self.lengths])

    def groups(self) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for number, group in enumerate(self.group_B.tolist()):
            groups.setdefault(group, []).append(number)
        return list(groups.values())


def random_rows(seed: int) -> Rows:
    source = random.Random(seed)
    sizes = {-4: 1, 0: 2, 3: 3, 8: 5, 9: 8}
    group_of = [group for group, size in sizes.items() for _ in range(size)]
    source.shuffle(group_of)
    rewards = [source.choice([0.0, 0.25, 1.0, source.uniform(-2, 2)]) for _ in group_of]
    lengths = [source.randrange(0, 9) for _ in group_of]
    return Rows(torch.tensor(rewards), torch.tensor(group_of), lengths)


Estimator = Callable[[Rows], Tensor]
ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rows: grpo(rows.rewards_B, rows.group_B),
    "grpo batch": lambda rows: grpo(rows.rewards_B, rows.group_B, scale="batch"),
    "grpo none": lambda rows: grpo(rows.rewards_B, rows.group_B, scale="none"),
    "grpo_passk": lambda rows: grpo_passk(rows.rewards_B, rows.group_B),
    "rloo": lambda rows: rloo(rows.rewards_B, rows.group_B),
    "rloo batch": lambda rows: rloo(rows.rewards_B, rows.group_B, scale="batch"),
    "reinforce_plus_plus_baseline": lambda rows: reinforce_plus_plus_baseline(
        rows.rewards_B, rows.group_B, rows.mask_BL
    ),
    "gpg": lambda rows: gpg(rows.rewards_B, rows.group_B),
    "opo": lambda rows: opo(rows.rewards_B, rows.group_B, rows.mask_BL),
    "opmd": lambda rows: opmd(rows.rewards_B, rows.group_B),
    "opmd logavgexp": lambda rows: opmd(rows.rewards_B, rows.group_B, baseline="logavgexp"),
    "gdpo": lambda rows: gdpo_of(rows),
    "gdpo tokens": lambda rows: gdpo_of(rows, over="tokens"),
}


def gdpo_of(rows: Rows, *, over: Over = "sequences") -> Tensor:
    parts_BK = torch.stack([rows.rewards_B, 10 * rows.rewards_B.square()], dim=1)
    weights_K = torch.tensor([1.0, 0.5])
    return gdpo(parts_BK, weights_K, rows.group_B, rows.mask_BL, whiten_over=over)


def test_rare_successes_weigh_by_the_pass_rate() -> None:
    """With the loss -A logprob, the mean over a group is the gradient of log(pass rate)."""
    rewards_B = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0])
    group_B = torch.tensor([0] * 4 + [1] * 4 + [2] * 2)
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0]
    assert grpo(rewards_B, group_B, scale="mean").tolist() == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match=r"scale=mean divides by the mean .* is -1; give"):
        grpo(rewards_B - 1, group_B, scale="mean")


def by_group(
    rows: Rows, baseline: Callable[[list[float], list[int]], float], *, alone: Singletons
) -> list[float]:
    """Reward minus the group's baseline, one group after the other."""
    rewards, advantages = rows.rewards_B.tolist(), [0.0] * len(rows.lengths)
    for group in rows.groups():
        members = [rewards[n] for n in group]
        lengths = [rows.lengths[n] for n in group]
        for n in group:
            advantages[n] = rewards[n] - baseline(members, lengths)
            if len(group) == 1:
                advantages[n] = rewards[n] if alone == "reward" else 0.0
    return advantages


def whitened(values: list[float], counts: list[int]) -> list[float]:
    tokens = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def test_a_baseline_by_length_may_be_that_of_one_token() -> None:
    mask_BL = jagged([torch.ones(length, dtype=torch.bool) for length in (1, 0)])
    advantages_B = opo(torch.tensor([2.0, 5.0]), torch.tensor([0, 0]), mask_BL)
    assert advantages_B.tolist() == [0.0, 3.0]


def mean_of(members: list[float], lengths: list[int]) -> float:
    return statistics.fmean(members)


def mean_by_length(members: list[float], lengths: list[int]) -> float:
    return sum(r * n for r, n in zip(members, lengths, strict=True)) / max(sum(lengths), 1)


def logavgexp(members: list[float], lengths: list[int]) -> float:
    return 0.3 * math.log(statistics.fmean(math.exp(r / 0.3) for r in members))


@pytest.mark.shows("4.18")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("alone", ALONE)
def test_each_estimator_is_its_definition(alone: Singletons, seed: int) -> None:
    rows = random_rows(seed)
    rewards_B, group_B, rewards = rows.rewards_B, rows.group_B, rows.rewards_B.tolist()
    centered = by_group(rows, mean_of, alone=alone)
    same: dict[int, float] = {
        n: statistics.stdev(rewards[m] for m in group) if len(group) > 1 else 1.0
        for group in rows.groups()
        for n in group
    }
    sizes = {n: len(group) for group in rows.groups() for n in group}
    with_signal = sum(std > 1e-5 if sizes[n] > 1 else centered[n] != 0 for n, std in same.items())
    others = [a * sizes[n] / max(sizes[n] - 1, 1) for n, a in enumerate(centered)]
    mean, std = statistics.fmean(others), statistics.stdev(others)
    soft = by_group(rows, logavgexp, alone=alone)
    expected: dict[Callable[..., Tensor], list[float]] = {
        grpo: [a / (same[n] + 1e-6) for n, a in enumerate(centered)],
        partial(grpo, std_floor=0.5, scale="batch"): [
            a / (statistics.stdev(rewards) + 0.5) for a in centered
        ],
        partial(grpo, scale="none"): centered,
        rloo: others,
        partial(rloo, scale="batch"): [(a - mean) / (std + 1e-4) for a in others],
        gpg: [a * len(rewards) / with_signal for a in centered],
        partial(gpg, signal="nonzero_rewards"): [
            a * len(rewards) / sum(r != 0 for r in rewards) for a in centered
        ],
        opmd: [a / 2 for a in centered],
        partial(opmd, baseline="logavgexp", tau=0.3): [a / 1.3 for a in soft],
        partial(opo, response_mask_BL=rows.mask_BL): by_group(rows, mean_by_length, alone=alone),
        partial(reinforce_plus_plus_baseline, response_mask_BL=rows.mask_BL): whitened(
            centered, list(rows.lengths)
        ),
    }
    for estimator, values in expected.items():
        advantages_B = estimator(rewards_B, group_B, singletons=alone)
        assert advantages_B.tolist() == pytest.approx(values, abs=2e-5), estimator


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_only_the_best_response_of_a_group_leads(
    seed: int, scale: Literal["group", "none"]
) -> None:
    rows = random_rows(seed)
    advantages_B = grpo_passk(rows.rewards_B, rows.group_B, scale=scale)
    for group in rows.groups():
        best, *others = sorted(group, key=rows.rewards_B.tolist().__getitem__, reverse=True)
        expected = 0.0
        if others:
            expected = float(rows.rewards_B[best] - rows.rewards_B[others[0]])
            expected /= float(rows.rewards_B[group].std()) + 1e-6 if scale == "group" else 1.0
        assert float(advantages_B[best]) == pytest.approx(expected, abs=1e-5)
        assert not advantages_B[others].any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alone", ALONE)
def test_rewards_are_compared_one_by_one_before_they_are_summed(
    alone: Singletons, seed: int
) -> None:
    rows = random_rows(seed)
    parts_BK = torch.stack([rows.rewards_B, rows.rewards_B.flip(0), rows.rewards_B.exp()], dim=1)
    weights_K = torch.tensor([1.0, 0.5, -2.0])
    parts = (parts_BK, weights_K, rows.group_B, rows.mask_BL)
    summed_B = sum(
        weight * grpo(column_B, rows.group_B, std_floor=0.01, singletons=alone).double()
        for weight, column_B in zip(weights_K, parts_BK.unbind(1), strict=True)
    )
    assert isinstance(summed_B, Tensor)
    over_rows = (summed_B - summed_B.mean()) / (summed_B.std() + 0.01)
    over_tokens = whitened(summed_B.tolist(), list(rows.lengths))
    expected: dict[Over, list[float]] = {"sequences": over_rows.tolist(), "tokens": over_tokens}
    for over, values in expected.items():
        advantages_B = gdpo(*parts, whiten_over=over, std_floor=0.01, singletons=alone)
        assert advantages_B.tolist() == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_groups_without_differences_have_exact_zeros(name: str) -> None:
    of_groups = {7: [0.7] * 12, 2: [-1 / 3] * 8, 5: [3.0], 6: [-1e6] * 2}
    rewards = [(reward, group) for group, same in of_groups.items() for reward in same]
    random.Random(0).shuffle(rewards)
    rewards_B, group_B = map(torch.tensor, zip(*rewards, strict=True))
    advantages_B = ESTIMATORS[name](Rows(rewards_B, group_B, [n % 8 for n in range(23)]))
    assert torch.equal(advantages_B, torch.zeros(23))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_odd_batches_give_finite_float32_without_gradient(name: str) -> None:
    for lengths in ([0], [3], [0, 0, 0], [1, 0, 0], [5, 5, 5]):
        rewards_B = torch.tensor([1e6, -1e6, 0.0][: len(lengths)], requires_grad=True)
        group_B = torch.zeros(len(lengths), dtype=torch.int64)
        advantages_B = ESTIMATORS[name](Rows(rewards_B, group_B, lengths))
        assert advantages_B.dtype == torch.float32
        assert not advantages_B.requires_grad
        assert bool(advantages_B.isfinite().all())


def test_a_std_of_all_responses_divides_by_their_number_on_request() -> None:
    group_B = torch.zeros(4, dtype=torch.int64)
    rewards_B = torch.tensor([0.0, 0.0, 0.0, 4.0])  # std 2, and sqrt(3) divided by n
    biased_B = grpo(rewards_B, group_B, unbiased=False)
    assert biased_B.tolist() == pytest.approx([-1 / math.sqrt(3)] * 3 + [math.sqrt(3)], abs=1e-5)


@pytest.mark.shows("4.17")
def test_each_response_token_gets_the_advantage_of_its_row() -> None:
    mask_BL = jagged([torch.tensor([False, True, True]), torch.tensor([False, False])])
    spread = spread_over_tokens(torch.tensor([2.0, float("nan")]), mask_BL)
    assert spread.values().tolist() == [0.0, 2.0, 2.0, 0.0, 0.0]
